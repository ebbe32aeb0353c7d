"""Data parallelism with FSDP2: shards weights, gradients and optimizer state over the `fsdp` mesh."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.interfaces import FSDPGroup
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.parallel.fsdp_messages import GatherByMessages, PendingSums, SumByMessages
from torchtitan_clone.parallel.unsharded import apply_unsharded


def apply_fsdp(
    model: nn.Module, *, groups: Sequence[FSDPGroup], blocks_per_group: int, mesh: DeviceMesh,
    parameter_mesh: DeviceMesh, experts: Sequence[nn.Module] = (), expert_mesh: DeviceMesh | None = None,
    training: Training, keeps_gradients: bool, parallelism: Parallelism,
) -> None:  # fmt: skip
    """Shards the groups of modules and then the rest of the model, in place; sums gradients over ranks.

    At most `blocks_per_group` blocks become one group. `keeps_gradients` leaves those of a single backward on a single
    rank in its data type.
    `experts` are modules whose parameters are sharded over the ep axis; they are sharded over `expert_mesh` further.
    """
    param_dtype = getattr(torch, training.mixed_precision_param)
    reduce_dtype = getattr(torch, training.mixed_precision_reduce)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    choice = parallelism.fsdp_reshard_after_forward
    if _shards_nothing(mesh) and not requests_fsdp(training, parallelism=parallelism) and not experts:
        apply_unsharded(
            model, mesh=mesh, parameter_mesh=parameter_mesh, dtype=param_dtype, keeps_gradients=keeps_gradients
        )
        return
    on_cuda = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_cuda) if training.enable_cpu_offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # Each of many micro-batches would gather the weights of a pipeline stage again.
    reshard = choice == "always" or (choice == "default" and parallelism.pipeline_parallel_degree == 1)
    for module in experts:
        assert expert_mesh is not None
        shard(
            module, mesh=expert_mesh, reshard_after_forward=reshard, shard_placement_fn=_expert_placement(expert_mesh)
        )
    groups = _merged(groups, max_blocks=blocks_per_group)
    for group in groups:
        # Weights that backward needs first would be gathered again at once.
        reshard_group = choice == "always" if group.starts_backward else reshard
        modules = list(group.modules)
        shard(modules if modules[1:] else modules[0], reshard_after_forward=reshard_group)
        if group.is_lookup:
            cast("FSDPModule", modules[0]).set_unshard_in_backward(False)
    shard(model, reshard_after_forward=reshard)
    _prefetch([group.modules[0] for group in groups if group.is_block], count=parallelism.fsdp_prefetch_blocks)
    # Under tensor parallelism the embedding returns a view; only in-place operations would have to know.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    # FSDP2 converts sums of another type at once.
    pending = PendingSums() if reduce_dtype == getattr(torch, training.dtype) else None
    for modules in ([model], *([module] for module in experts), *(group.modules for group in groups)):
        own_mesh = expert_mesh if expert_mesh is not None and modules[0] in experts else mesh
        _set_communication(modules, mesh=own_mesh, pending=pending)
        for module in modules:
            if not _is_trained(module):
                # Else the backward of the block above prefetches frozen weights for nothing.
                cast("FSDPModule", module).set_unshard_in_backward(False)


def _merged(groups: Sequence[FSDPGroup], *, max_blocks: int) -> list[FSDPGroup]:
    """Returns the groups with up to so many consecutive blocks in one, all or none of them frozen.

    Sizes of groups of blocks differ by at most one.
    """
    merged = list[FSDPGroup]()
    for (is_block, _), run in groupby(groups, key=lambda group: (group.is_block, _is_trained(group.modules[0]))):
        alike = list(run)
        if not is_block:
            merged += alike
            continue
        blocks = [module for group in alike for module in group.modules]
        count = -(-len(blocks) // max_blocks)
        bounds = pairwise(len(blocks) * index // count for index in range(count + 1))
        merged += [FSDPGroup(is_block=True, modules=blocks[start:end]) for start, end in bounds]
    return merged


def requests_fsdp(training: Training, *, parallelism: Parallelism) -> bool:
    """Returns whether options need FSDP where nothing is sharded: offload, sums of another type, or "always"."""
    is_another_type = training.mixed_precision_reduce != training.dtype
    return is_another_type or training.enable_cpu_offload or parallelism.fsdp_reshard_after_forward == "always"


def _shards_nothing(mesh: DeviceMesh) -> bool:
    """Whether ranks shard no parameters: ranks of a CPU, or a single one."""
    return mesh.shape[-1] == 1 and (dist.get_world_size() == 1 or _is_on_gloo(mesh))


def _is_on_gloo(mesh: DeviceMesh) -> bool:
    """Whether the mesh communicates on a CPU, which simulated runs, that predict a GPU, do not."""
    return dist.get_backend(mesh.get_group(-1)) == "gloo"


def _set_communication(modules: Sequence[nn.Module], *, mesh: DeviceMesh, pending: PendingSums | None) -> None:
    """Makes FSDP sum gradients, not average them: the loss is divided by the targets of all ranks.

    On a CPU it communicates in the background.
    """
    for module in cast("Sequence[Any]", modules):  # its methods want subclasses of private classes
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        module.set_gradient_divide_factor(1.0)  # costs a division if there is one shard
        if _is_on_gloo(mesh) and mesh.shape[-1] > 1:
            module.set_custom_all_gather(GatherByMessages())
            module.set_custom_reduce_scatter(SumByMessages(modules, pending=pending if mesh.ndim == 1 else None))


def _expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Returns how FSDP shards a stack of experts: the first dimension that the shards divide.

    If they divide none, by experts, of which FSDP pads the shards; it does not pad other dimensions.
    """

    def placement(weight: nn.Parameter) -> Shard:
        sizes = local_shard(weight).shape
        return Shard(next((dim for dim, size in enumerate(sizes) if size % mesh.shape[-1] == 0), 0))

    return placement


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _prefetch(blocks: list[nn.Module], *, count: int) -> None:
    """Makes every block gather the weights of the next `count` ones, in the order of forward and of backward."""
    trained = [block for block in blocks if _is_trained(block)]
    forward = FSDPModule.set_modules_to_forward_prefetch
    backward = FSDPModule.set_modules_to_backward_prefetch
    for set_prefetch, order in ((forward, blocks), (backward, trained[::-1])):
        modules = cast("list[FSDPModule]", order)
        for index, block in enumerate(modules):
            if following := modules[index + 1 : index + 1 + count]:
                set_prefetch(block, following)
