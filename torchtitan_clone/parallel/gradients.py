"""Norms of gradients and sums of numbers over all ranks."""

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.torch_compat import foreach_mul_, foreach_norms


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
    """Scales all gradients in place so that their norm over the model is at most `max_norm`; returns the norm before.

    A collective over all ranks: a parameter may be replicated, sharded over any axes, or on some pipeline stages only.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [local_shard(gradient) for gradient in gradients]
    squares = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    if local:  # empty on a rank whose blocks are all frozen
        # In fp32 torch's norm of a large tensor on CPU is off by 1e-5, differently for each way of sharding.
        norms = foreach_norms(local, dtype=torch.float64)
        # Replicas count once, so that one sum over all ranks is enough for every mesh.
        replicas = torch.tensor([_num_replicas(g) for g in gradients], dtype=torch.float64)
        squares = (norms.square() / replicas.to(norms.device, non_blocking=True)).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().float()
    if local:
        foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _num_replicas(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return prod(size for size, placement in sizes if placement.is_replicate())


def sum_over_ranks(values: list[float]) -> list[float]:
    """Returns the sum of each number over all ranks; a collective on the CPU, without a host sync."""
    if dist.get_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()
