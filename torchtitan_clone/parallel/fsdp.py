"""Data parallelism with FSDP2: weights, gradients and optimizer state are shards of the `fsdp` mesh."""

import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from torchtitan_clone.config.schema import Parallelism, Training
from torchtitan_clone.parallel.tensor import is_tied


def apply_fsdp(model: Any, *, mesh: DeviceMesh, training: Training, parallelism: Parallelism) -> None:
    """Shards every block, the embedding, and norm with output, in place.

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
    ends = [module for module in (model.norm, model.output) if module is not None]
    tied = is_tied(model)
    if model.tok_embeddings is not None and not tied:
        fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **options)
        # The gradient of a lookup does not take the table.
        cast("FSDPModule", model.tok_embeddings).set_unshard_in_backward(False)
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=reshard, **options)
    # Backward starts with the output, so that freeing it after forward would only gather it twice.
    reshard_ends = choice == "always"
    if ends:
        # Two modules that share a weight must be one group.
        group = [model.tok_embeddings, *ends] if tied else ends
        fully_shard(group, reshard_after_forward=reshard_ends, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    _prefetch(list(model.layers.values()), count=parallelism.fsdp_prefetch_blocks)
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
