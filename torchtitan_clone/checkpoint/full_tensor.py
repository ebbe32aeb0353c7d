"""Assembles complete tensors of another format from the shards that the ranks hold of ours, one at a time.

Each rank announces its shards; then, tensor by tensor, the values are sent as bytes over the CPU to the rank that wants
it. This works for shards, replicas and pipeline stages. No rank holds more than one complete tensor beside its shards.
"""

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.tensor_file import Entry, bytes_of, entry_for
from torchtitan_clone.ops.dtensor_shards import TensorShard, gather_shard_map, local_shard
from torchtitan_clone.ops.tensor_pieces import Pieces, sources_of


class FullTensorGather:
    """Collects tensors of another format, which `pieces` says how to assemble from those that the ranks hold.

    All ranks must construct it and call `collect` in the same order. Floating-point tensors are converted to `dtype`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, pieces: Pieces, dtype: torch.dtype, group: dist.ProcessGroup):
        self._group = group
        self._rank = dist.get_rank()
        self._dtype = dtype
        self._local = {name: local_shard(tensor) for name, tensor in tensors.items()}
        shard_map = gather_shard_map(tensors, group=group)
        self._shards = {name: _without_replicas(shards) for name, shards in shard_map.items()}
        self._sources = sources_of(pieces)

    def entries(self) -> list[Entry]:
        """Returns the tensors that can be collected."""
        dtypes = {ours: next(iter(shards.values())).dtype for ours, shards in self._shards.items()}
        return [
            entry_for(name, dtype=exported_dtype(dtypes[ours], wanted=self._dtype), shape=piece.shape)
            for name, ((ours, piece), *_) in self._sources.items()
        ]

    def holder(self, name: str) -> int:
        """Returns a rank that holds some of the tensor."""
        ours, _ = self._sources[name][0]
        return next(iter(self._shards[ours]))

    def collect(self, entry: Entry, *, at: int) -> Tensor | None:
        """Returns the complete tensor on the CPU of rank `at`, None on the others."""
        complete = torch.empty(entry.shape, dtype=entry.torch_dtype) if self._rank == at else None
        for ours, piece in self._sources[entry.name]:
            for holder, shard in self._shards[ours].items():
                overlap = piece.overlap(shard.global_shape, offset=shard.offset, size=shard.size)
                if overlap is None:
                    continue
                target = None if complete is None else overlap.in_source(complete)
                if self._rank == holder:
                    self._deliver(overlap.in_box(self._local[ours].detach()), entry=entry, at=at, target=target)
                elif target is not None:
                    self._receive(target, holder=holder)
        return complete

    def _deliver(self, shard: Tensor, *, entry: Entry, at: int, target: Tensor | None) -> None:
        values = shard.to(dtype=entry.torch_dtype).cpu()
        if target is None:
            dist.send(bytes_of(values), dst=at, group=self._group)
        else:
            target.copy_(values)

    def _receive(self, wanted: Tensor, *, holder: int) -> None:
        values = torch.empty(wanted.shape, dtype=wanted.dtype)
        dist.recv(bytes_of(values), src=holder, group=self._group)
        wanted.copy_(values)


def exported_dtype(dtype: torch.dtype, *, wanted: torch.dtype) -> torch.dtype:
    """Returns the wanted type for floating-point types; integers and booleans stay."""
    return wanted if dtype.is_floating_point else dtype


def _without_replicas(shards: Mapping[int, TensorShard]) -> dict[int, TensorShard]:
    """Returns the nonempty shards, each of the first rank that holds it."""
    chosen: dict[tuple[int, ...], int] = {}
    for rank, shard in sorted(shards.items()):
        if prod(shard.size) or not prod(shard.global_shape):
            chosen.setdefault(shard.offset, rank)
    found = {rank: shards[rank] for rank in chosen.values()}
    global_shape = next(iter(found.values())).global_shape
    assert sum(prod(shard.size) for shard in found.values()) == prod(global_shape), f"shards are missing: {found}"
    return found
