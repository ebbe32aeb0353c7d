"""Whole tensors from what the ranks hold of them, one at a time.

Every rank says which parts it holds; then, tensor by tensor, those parts travel to the one rank that wants it, as
bytes over the CPU. It does not matter what split the tensors: shards, replicas, pipeline stages. No rank ever holds
more than one whole tensor beside its own shards.
"""

from collections.abc import Iterable, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.tensor_file import Entry, bytes_of, entry_for
from torchtitan_clone.ops.dtensor_shards import TensorShard, gather_shard_map, local_shard


class FullTensorGather:
    """The tensors of all ranks by name. To be made, and `collect` to be called, by all ranks in the same order.

    Floating-point tensors come in `dtype`, others in their own.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, group: dist.ProcessGroup):
        self._group = group
        self._rank = dist.get_rank()
        self._dtype = dtype
        self._local = {name: local_shard(tensor) for name, tensor in tensors.items()}
        everyones = gather_shard_map(tensors, group=group)
        self._parts = {name: _without_copies(parts) for name, parts in everyones.items()}

    def entries(self, names: Iterable[str]) -> list[Entry]:
        """The tensors of these names as they come out."""
        parts = {name: next(iter(self._parts[name].values())) for name in names}
        return [
            entry_for(name, dtype=exported_dtype(part.dtype, wanted=self._dtype), shape=part.global_shape)
            for name, part in parts.items()
        ]

    def holder(self, name: str) -> int:
        """A rank that holds some of the tensor."""
        return next(iter(self._parts[name]))

    def collect(self, entry: Entry, *, at: int) -> Tensor | None:
        """The whole tensor on the CPU of rank `at`, None on the others."""
        dtype = entry.torch_dtype
        whole = torch.empty(entry.shape, dtype=dtype) if self._rank == at else None
        for holder, part in self._parts[entry.name].items():
            values = None
            if self._rank == holder:
                values = self._local[entry.name].detach().to(dtype=dtype).cpu().contiguous()
                if at != holder:
                    dist.send(bytes_of(values), dst=at, group=self._group)
            elif self._rank == at:
                values = torch.empty(part.size, dtype=dtype)
                dist.recv(bytes_of(values), src=holder, group=self._group)
            if whole is not None and values is not None:
                whole[_region(part)] = values
        return whole


def exported_dtype(dtype: torch.dtype, *, wanted: torch.dtype) -> torch.dtype:
    """Floating-point types become the wanted one; integers and booleans stay."""
    return wanted if dtype.is_floating_point else dtype


def _without_copies(parts: Mapping[int, TensorShard]) -> dict[int, TensorShard]:
    """Of ranks that hold the same, the first; none that holds nothing."""
    chosen: dict[tuple[int, ...], int] = {}
    for rank, part in sorted(parts.items()):
        if prod(part.size) or not prod(part.global_shape):
            chosen.setdefault(part.offset, rank)
    found = {rank: parts[rank] for rank in chosen.values()}
    whole = next(iter(found.values())).global_shape
    assert sum(prod(part.size) for part in found.values()) == prod(whole), f"parts are missing: {found}"
    return found


def _region(part: TensorShard) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offset, part.size, strict=True))
