"""Data parallelism with FSDP2: weights, gradients and optimizer state are shards of the `fsdp` mesh."""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from torchtitan_clone.config.schema import Parallelism, Training


class FSDPGroup(Protocol):
    """Modules whose weights are gathered and freed together."""

    @property
    def modules(self) -> Sequence[nn.Module]: ...
    @property
    def is_block(self) -> bool:
        """Whether it is a block, whose weights can be prefetched by the blocks before it."""
        ...

    @property
    def starts_backward(self) -> bool:
        """Whether backward starts with it."""
        ...

    @property
    def is_lookup(self) -> bool:
        """Whether its backward does not read its weights."""
        ...


def apply_fsdp(model: Any, *, mesh: DeviceMesh, training: Training, parallelism: Parallelism) -> None:
    """Shards the groups of modules that the model names, in place.

    Gradients are summed over ranks, not averaged: the loss is already divided by the number of targets of all ranks.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        ),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    choice = parallelism.fsdp_reshard_after_forward
    # A pipeline's stage is used by many micro-batches, and would be gathered anew for each.
    reshard = choice == "always" or (choice == "default" and parallelism.pipeline_parallel_degree == 1)
    groups: Sequence[FSDPGroup] = model.fsdp_groups()
    for group in groups:
        # What starts backward would only be gathered twice.
        reshard_group = choice == "always" if group.starts_backward else reshard
        modules = list(group.modules)
        fully_shard(modules if modules[1:] else modules[0], reshard_after_forward=reshard_group, **options)
        if group.is_lookup:
            cast("FSDPModule", modules[0]).set_unshard_in_backward(False)
    fully_shard(model, reshard_after_forward=reshard, **options)
    _prefetch([group.modules[0] for group in groups if group.is_block], count=parallelism.fsdp_prefetch_blocks)
    # Under tensor parallelism the embedding returns a view; it matters to in-place operations, and there are none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum; a plain one is exact with a factor of one.
            module.set_force_sum_reduction_for_comms(True)
            if not any(parameter.requires_grad for parameter in cast("nn.Module", module).parameters()):
                # Else the backward of the block behind gathers frozen weights ahead, for nothing.
                module.set_unshard_in_backward(False)


def _prefetch(blocks: list[Any], *, count: int) -> None:
    """Has every block gather the weights of the `count` that follow it, in the order of forward and of backward."""
    trained = [block for block in blocks if any(parameter.requires_grad for parameter in block.parameters())]
    for set_prefetch, order in (
        ("set_modules_to_forward_prefetch", blocks),
        ("set_modules_to_backward_prefetch", trained[::-1]),
    ):
        for index, block in enumerate(order):
            if following := order[index + 1 : index + 1 + count]:
                getattr(block, set_prefetch)(following)
