"""Whole tensors from what the ranks hold of them, one at a time.

Every rank says which parts it holds; then, tensor by tensor, those parts travel to the one rank that wants it, as
bytes over the CPU. It does not matter what split the tensors: shards, replicas, pipeline stages. No rank ever holds
more than one whole tensor beside its own shards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.tensor_file import Entry, bytes_of, entry_for
from torchtitan_clone.shards import local_part


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank holds of one tensor."""

    rank: int
    dtype: torch.dtype
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Gather:
    """The tensors of all ranks by name. To be made, and `collect` to be called, by all ranks in the same order.

    Floating-point tensors come in `dtype`, others in their own.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, group: dist.ProcessGroup):
        self._group = group
        self._rank = dist.get_rank()
        self._dtype = dtype
        self._local = {name: local_part(tensor)[0] for name, tensor in tensors.items()}
        mine = {name: _part(tensor, rank=self._rank) for name, tensor in tensors.items()}
        everyone: list[dict[str, _Part]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine, group=group)
        self._parts: dict[str, list[_Part]] = {}
        for name in {name: None for parts in everyone for name in parts}:
            self._parts[name] = _without_copies(parts[name] for parts in everyone if name in parts)

    def entries(self, names: Iterable[str]) -> list[Entry]:
        """The tensors of these names as they come out."""
        first = {name: self._parts[name][0] for name in names}
        return [
            entry_for(name, dtype=exported_dtype(part.dtype, wanted=self._dtype), shape=part.whole_shape)
            for name, part in first.items()
        ]

    def holder(self, name: str) -> int:
        """A rank that holds some of the tensor."""
        return self._parts[name][0].rank

    def collect(self, entry: Entry, *, at: int) -> Tensor | None:
        """The whole tensor on the CPU of rank `at`, None on the others."""
        dtype = entry.torch_dtype
        whole = torch.empty(entry.shape, dtype=dtype) if self._rank == at else None
        for part in self._parts[entry.name]:
            values = None
            if self._rank == part.rank:
                values = self._local[entry.name].detach().to(dtype=dtype).cpu().contiguous()
                if at != part.rank:
                    dist.send(bytes_of(values), dst=at, group=self._group)
            elif self._rank == at:
                values = torch.empty(part.shape, dtype=dtype)
                dist.recv(bytes_of(values), src=part.rank, group=self._group)
            if whole is not None and values is not None:
                whole[_region(part)] = values
        return whole


def exported_dtype(dtype: torch.dtype, *, wanted: torch.dtype) -> torch.dtype:
    """Floating-point types become the wanted one; integers and booleans stay."""
    return wanted if dtype.is_floating_point else dtype


def _part(tensor: Tensor, *, rank: int) -> _Part:
    local, offset = local_part(tensor)
    return _Part(
        rank=rank, dtype=tensor.dtype, whole_shape=tuple(tensor.shape), offset=offset, shape=tuple(local.shape)
    )


def _without_copies(parts: Iterable[_Part]) -> list[_Part]:
    """Of ranks that hold the same, the first; none that holds nothing."""
    chosen: dict[tuple[int, ...], _Part] = {}
    for part in parts:
        if prod(part.shape) or not prod(part.whole_shape):
            chosen.setdefault(part.offset, part)
    found = list(chosen.values())
    assert sum(prod(part.shape) for part in found) == prod(found[0].whole_shape), f"parts are missing: {found}"
    return found


def _region(part: _Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offset, part.shape, strict=True))
