"""What part of a whole tensor each rank holds: a box of it, or all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor, a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard_and_offset(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of the tensor, and where it starts in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


Box = list[tuple[int, int]]
"""First and last (exclusive) index in each dimension of the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank holds of a tensor. Equal parts hold equal numbers."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    whole: torch.Size
    dtype: torch.dtype
    device_type: str

    def overlap(self, other: "Part") -> Box | None:
        """What both hold."""
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        box = [(max(a, b), min(a + a_size, b + b_size)) for a, a_size, b, b_size in ends]
        return box if all(first < last for first, last in box) else None

    def window(self, box: Box) -> tuple[slice, ...]:
        """Where the box lies in this part."""
        return tuple(slice(a - start, b - start) for (a, b), start in zip(box, self.offset, strict=True))


Parts = Mapping[str, Mapping[int, Part]]
"""The parts of every rank, by the tensor's name."""


def gather_shard_map(tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> Parts:
    """Who has which part of what; a collective."""
    mine = {}
    for name, tensor in tensors.items():
        local, offset = local_shard_and_offset(tensor)
        mine[name] = Part(
            offset=offset,
            size=tuple(local.shape),
            whole=tensor.shape,
            dtype=tensor.dtype,
            device_type=local.device.type,
        )
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine, group=group)
    found: dict[str, dict[int, Part]] = {}
    for rank, parts in enumerate(everyones):
        for name, part in parts.items():
            found.setdefault(name, {})[rank] = part
    return found
