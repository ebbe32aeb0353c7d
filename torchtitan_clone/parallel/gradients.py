"""Norms of gradients and sums of numbers over all ranks."""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_clone.comm.tracing import OVER_ALL_RANKS
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.torch_compat import foreach_norms, is_fake

_PIECE = 2**17
"""Elements that a CPU converts to float64 at a time."""
_SMALL = 2**14
"""Elements of the largest tensor that torch's norm may copy as a whole, with fewer calls."""
FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities of P100, V100, A100, H100 or H200, and B200: float64 at a half of the speed of fp32."""


def gradient_norm(parameters: Iterable[nn.Parameter], *, ranks: int) -> Tensor:
    """Returns the norm [] of all gradients of the model, fp32.

    A collective over all ranks: a parameter is on `ranks` of them, those of a pipeline stage, as shards or copies.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = share_of_squares(gradients, like=gradients, ranks=ranks, device=parameters[0].device)
    if dist.get_world_size() > 1:
        with OVER_ALL_RANKS:
            dist.all_reduce(squares)
    return squares.sqrt().float()


def share_of_squares(tensors: Sequence[Tensor], *, like: Sequence[Tensor], ranks: int, device: torch.device) -> Tensor:
    """Returns this rank's share [] of the sum of squares of all elements, fp64; zero on `device` without tensors.

    `tensors` are laid out as `like`, or are this rank's shards of such. The shares of all ranks add up on every mesh,
    because replicas count once: each tensor is on `ranks` of them, as shards or copies.
    """
    if not tensors:  # on a rank whose blocks are all frozen
        return torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():  # else each shard would be the result of a function of autograd
        local = [local_shard(tensor) for tensor in tensors]
    squares = norms_of(local).double().square()
    if dist.get_world_size() > 1:
        copies = torch.tensor([ranks / _num_shards(x) for x in like], dtype=torch.float64, pin_memory=local[0].is_cuda)
        squares /= copies.to(squares.device, non_blocking=True)
    return squares.sum()


def clipping_factor(norm: float, *, max_norm: float) -> float:
    """Returns what gradients of a norm are multiplied by: min(1, max_norm / (norm + 1e-6)), computed in fp32."""
    inverse = np.float32(1.0) / (np.float32(norm) + np.float32(1e-6))  # without a tensor: as torch divides a number
    return min(1.0, float(inverse * np.float32(max_norm)))


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Returns the 2-norm [len(tensors)] of each tensor, on a CPU in float64."""
    device = tensors[0].device
    if device.type == "cpu" and not is_fake(tensors[0]):  # a simulation would take seconds for its many pieces
        small = [x for x in tensors if x.numel() <= _SMALL]
        of_small = iter(foreach_norms(small, dtype=torch.float64) if small else ())
        return torch.stack([next(of_small) if x.numel() <= _SMALL else _sum_of_squares(x).sqrt() for x in tensors])
    return foreach_norms(tensors, dtype=norm_dtype(_capability(device)))


def _sum_of_squares(x: Tensor) -> Tensor:
    """Returns the sum of squares [] in float64, a piece at a time, which stays in the cache.

    torch's norm in float64 copies all of the tensor first. In fp32 it is off by 1e-5, differently for each sharding.
    """
    pieces = (piece.double() for piece in x.reshape(-1).split(_PIECE))
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()


def norm_dtype(capability: tuple[int, int] | None) -> torch.dtype:
    """Returns what squares are summed in on a CUDA device of this compute capability; None: it is simulated.

    A GPU sums pairs of partial sums, so that fp32 is exact to 1e-6; most have few units for float64.
    """
    return torch.float64 if capability is None or capability in FAST_FLOAT64 else torch.float32


def _capability(device: torch.device) -> tuple[int, int] | None:
    is_present = device.type == "cuda" and torch.cuda.is_available()  # else it is simulated
    return torch.cuda.get_device_capability(device) if is_present else None


def _num_shards(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def sum_over_ranks(values: list[float]) -> list[float]:
    """Returns the sum of each number over all ranks; a collective on the CPU, without a host sync."""
    if dist.get_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    with OVER_ALL_RANKS:
        dist.all_reduce(total)
    return total.tolist()
