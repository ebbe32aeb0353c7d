"""Complete tensors of another format from what the ranks hold of ours, one at a time.

Every rank says which parts it holds; then, tensor by tensor, the values travel to the one rank that wants it, as
bytes over the CPU. It does not matter what split the tensors: shards, replicas, pipeline stages. No rank ever holds
more than one complete tensor beside its own shards.
"""

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.tensor_file import Entry, bytes_of, entry_for
from torchtitan_clone.ops.dtensor_shards import TensorShard, gather_shard_map, local_shard
from torchtitan_clone.ops.tensor_pieces import Overlap, Pieces, sources_of


class FullTensorGather:
    """Collects tensors that are made up of those that the ranks hold, as `pieces` says for each of ours by name.

    To be made, and `collect` to be called, by all ranks in the same order. Floating-point tensors come in `dtype`,
    others in their own.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, pieces: Pieces, dtype: torch.dtype, group: dist.ProcessGroup
    ):  # fmt: skip
        self._group = group
        self._rank = dist.get_rank()
        self._dtype = dtype
        self._local = {name: local_shard(tensor) for name, tensor in tensors.items()}
        everyones = gather_shard_map(tensors, group=group)
        self._parts = {name: _without_copies(parts) for name, parts in everyones.items()}
        self._sources = sources_of(pieces)

    def entries(self) -> list[Entry]:
        """Returns the tensors that can be collected."""
        found: list[Entry] = []
        for name, users in self._sources.items():
            ours, piece = users[0]
            part = next(iter(self._parts[ours].values()))
            found.append(entry_for(name, dtype=exported_dtype(part.dtype, wanted=self._dtype), shape=piece.shape))
        return found

    def holder(self, name: str) -> int:
        """Returns a rank that holds some of the tensor."""
        ours, _ = self._sources[name][0]
        return next(iter(self._parts[ours]))

    def collect(self, entry: Entry, *, at: int) -> Tensor | None:
        """Returns the complete tensor on the CPU of rank `at`, None on the others."""
        complete = torch.empty(entry.shape, dtype=entry.torch_dtype) if self._rank == at else None
        for ours, piece in self._sources[entry.name]:
            for holder, part in self._parts[ours].items():
                overlap = piece.overlap(part.global_shape, offset=part.offset, size=part.size)
                if overlap is None:
                    continue
                if self._rank == holder:
                    values = overlap.in_box(self._local[ours].detach()).to(dtype=entry.torch_dtype).cpu()
                    self._deliver(values, at=at, complete=complete, overlap=overlap)
                elif complete is not None:
                    self._receive(overlap.in_source(complete), holder=holder)
        return complete

    def _deliver(self, values: Tensor, *, at: int, complete: Tensor | None, overlap: Overlap) -> None:
        if complete is None:
            dist.send(bytes_of(values), dst=at, group=self._group)
        else:
            overlap.in_source(complete).copy_(values)

    def _receive(self, wanted: Tensor, *, holder: int) -> None:
        values = torch.empty(wanted.shape, dtype=wanted.dtype)
        dist.recv(bytes_of(values), src=holder, group=self._group)
        wanted.copy_(values)


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
