"""Data parallelism with FSDP2: shards weights, gradients and optimizer state over the `fsdp` mesh.

On a CPU FSDP2 has no streams and waits for each collective. Its all-gathers and reduce-scatters are messages between
all pairs of ranks there, which go on while a rank computes: gloo's copy through memory of their own, and take 1.5 and 3
times as long. Each rank sends and receives as many bytes as in a ring.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.collectives import Messages, others, start_all_to_all, start_exchange, sum_parts
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.interfaces import FSDPGroup, modules_that_keep_dtype
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.parallel.unsharded import apply_unsharded


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What suits the device and the run: run/plan.py decides."""

    blocks_per_group: int
    """At most so many blocks become one group of FSDP."""
    keeps_gradients: bool
    """Whether a single rank leaves the gradients of a single backward in its data type."""


def apply_fsdp(
    model: nn.Module, *, groups: Sequence[FSDPGroup], mesh: DeviceMesh, parameter_mesh: DeviceMesh,
    experts: Sequence[nn.Module] = (), expert_mesh: DeviceMesh | None = None, training: Training,
    parallelism: Parallelism, options: ShardingOptions,
) -> None:  # fmt: skip
    """Shards the groups of modules and then the rest of the model, in place; sums gradients over ranks.

    A single rank that computes in the data type of the parameters leaves the model as it is.
    `experts` are modules whose parameters are sharded over the ep axis; they are sharded over `expert_mesh` further.
    Modules that keep their data type are one more group, which stays gathered from the first to the last of them.
    """
    param_dtype = getattr(torch, training.mixed_precision_param)
    reduce_dtype = getattr(torch, training.mixed_precision_reduce)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    choice = parallelism.fsdp_reshard_after_forward
    if _shards_nothing(mesh) and not requests_fsdp(training, parallelism=parallelism) and not experts:
        if dist.get_world_size() > 1 or any(weight.dtype != param_dtype for weight in model.parameters()):
            apply_unsharded(
                model, mesh=mesh, parameter_mesh=parameter_mesh, dtype=param_dtype,
                keeps_gradients=options.keeps_gradients,
            )  # fmt: skip
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
    precise = modules_that_keep_dtype(model) if param_dtype != getattr(torch, training.dtype) else []
    if precise:
        shard(precise, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=False)
    groups = _merged(groups, max_blocks=options.blocks_per_group)
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
    own = [precise] if precise else []
    for modules in ([model], *own, *([module] for module in experts), *(group.modules for group in groups)):
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


def _set_communication(modules: Sequence[nn.Module], *, mesh: DeviceMesh, pending: "PendingSums | None") -> None:
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


# ---------------------------------------------------------------- collectives on a CPU

_MAX_PENDING_SUMS = 2
"""Sums that a backward leaves incomplete at a time: they take memory."""


class GatherByMessages:
    """Gathers a tensor of each rank of a group, as FSDP's weights."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for an output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Messages:
        """Starts to gather the input [n] of each rank to the output [ranks * n], of which FSDP makes it a part."""
        parts = output_tensor.chunk(group.size())
        if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
            parts[group.rank()].copy_(input_tensor)
        received = others(parts, group=group)
        sent = [(target, input_tensor) for target, _ in received]
        return start_exchange(sent, received, group=group, collective="all_gather", own=[input_tensor])


class SumByMessages:
    """Sums the gradients of modules over the ranks of a group, in their order; `pending` completes the sums later."""

    def __init__(self, modules: Sequence[nn.Module], *, pending: "PendingSums | None") -> None:
        self._modules = modules
        self._pending = pending

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for an input or an output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        """Starts to sum the parts [n] of all ranks' inputs [ranks * n] that belong to this rank to the output [n]."""
        own = input_tensor.chunk(group.size())
        parts, messages = start_all_to_all(own, group=group, collective="reduce_scatter")

        def complete() -> None:
            messages.wait()
            sum_parts(parts, out=output_tensor)

        if self._pending is None:
            complete()
        else:
            self._pending.add(complete, modules=self._modules)


class PendingSums:
    """Sums of gradients that a backward completes when it ends."""

    def __init__(self) -> None:
        self._completions = deque[Callable[[], object]]()

    def add(self, complete: Callable[[], object], *, modules: Sequence[nn.Module]) -> None:
        """Takes what completes the sum of the modules' gradients; calls it if no backward will end or FSDP adds it."""
        parameters = (parameter for module in modules for parameter in _own_parameters(module))
        if not torch_compat.runs_backward() or any(parameter.grad is not None for parameter in parameters):
            complete()
            return
        torch_compat.after_backward(self._complete)
        self._completions.append(complete)
        while len(self._completions) > _MAX_PENDING_SUMS:
            self._completions.popleft()()

    def _complete(self) -> None:
        while self._completions:
            self._completions.popleft()()


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that FSDP shards with this module, not those of modules inside that have a group."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
