"""Which rank writes which shard of which tensor, and where it is in that rank's safetensors file.

`index.json` maps each tensor to its shards; torch's HuggingFaceStorageReader can read the files too. A plain tensor
counts as replicated over all ranks that have it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.tensor_file import NAMES, bytes_of, entry_for, file_header
from torchtitan_clone.comm.json_collectives import gather_json, scatter_json
from torchtitan_clone.ops.dtensor_shards import (
    TensorShard,
    describe_shard,
    local_shard,
    shards_from_json,
    shards_to_json,
)

INDEX_FILE = "index.json"
OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Entry of a header, as torch's reader expects it: the offset of each shard."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A shard that a rank writes, and its bytes [begin, end) in the rank's file."""

    name: str
    shard: TensorShard
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank writes. `total_bytes` is over all ranks; only rank 0 has the `index` of all files, as JSON."""

    file: str
    header: bytes
    placements: Sequence[Placement]
    index: str = ""
    total_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.placements[-1].end if self.placements else len(self.header)

    def shards(self, state: dict[str, Tensor]) -> Iterator[tuple[Placement, Tensor]]:
        """Yields every placement with its values as a 1-D tensor of bytes; a view if the values are contiguous."""
        for placement in self.placements:
            yield placement, bytes_of(local_shard(state[placement.name]))


def plan_save(state: Mapping[str, Tensor]) -> Plan:
    """Plans with all ranks who writes what; valid as long as names, shapes and shardings stay. Collective."""
    shards = {name: describe_shard(tensor) for name, tensor in state.items()}
    plans = _plans([shards_from_json(value) for value in gather_json(shards_to_json(shards))])
    written = [[[placement.name for placement in plan.placements], plan.total_bytes] for plan in plans]
    names, total_bytes = scatter_json(written).items(count=2)
    own = {name: shards[name] for name in (value.choice(*shards) for value in names.items())}
    plan = replace(_plan_file(own, rank=dist.get_rank()), total_bytes=total_bytes.integer())
    return replace(plan, index=plans[0].index) if plans else plan


def plan_save_offline(state: Mapping[str, Tensor]) -> Plan:
    """Plans a save by one process without a process group. Needs no values: tensors may be on the meta device."""
    return _plans([{name: describe_shard(tensor) for name, tensor in state.items()}])[0]


def _plans(shards_of_ranks: Sequence[Mapping[str, TensorShard]]) -> list[Plan]:
    if not shards_of_ranks:
        return []
    files = [_plan_file(shards, rank=rank) for rank, shards in enumerate(_without_replicas(shards_of_ranks))]
    total_bytes = sum(plan.bytes for plan in files)
    plans = [replace(plan, total_bytes=total_bytes) for plan in files]
    return [replace(plans[0], index=_index(plans)), *plans[1:]]


def _without_replicas(shards_of_ranks: Sequence[Mapping[str, TensorShard]]) -> list[dict[str, TensorShard]]:
    """Keeps every shard on one of the ranks that hold it: the one that has the fewest bytes to write so far."""
    holders: dict[tuple[str, TensorShard], list[int]] = {}
    for rank, shards in enumerate(shards_of_ranks):
        for name, shard in shards.items():
            holders.setdefault((name, shard), []).append(rank)
    written: list[dict[str, TensorShard]] = [{} for _ in shards_of_ranks]
    written_bytes = [0] * len(written)
    for (name, shard), ranks in holders.items():
        rank = min(ranks, key=written_bytes.__getitem__)
        written[rank][name] = shard
        written_bytes[rank] += prod(shard.size) * shard.dtype.itemsize
    return written


def _plan_file(shards: Mapping[str, TensorShard], *, rank: int) -> Plan:
    """Places the shards one after another, largest item size first, so that all are aligned without padding."""
    names = sorted(shards, key=lambda name: (-shards[name].dtype.itemsize, name))
    entries = [entry_for(name, dtype=shards[name].dtype, shape=shards[name].size) for name in names]
    offsets = {name: {"saved_offsets": shards[name].offset} for name in names}
    header = file_header(entries, metadata={OFFSETS_KEY: json.dumps(offsets)})
    ends = accumulate((entry.num_bytes for entry in entries), initial=len(header))
    spans = zip(names, pairwise(ends), strict=True)
    placements = [Placement(name=name, shard=shards[name], begin=begin, end=end) for name, (begin, end) in spans]
    return Plan(file=f"rank-{rank}.safetensors", header=header, placements=placements)


def _index(plans: Sequence[Plan]) -> str:
    """Returns the content of `index.json`; the "parts" of a tensor are offset, size, file and first byte of shards."""
    tensors: dict[str, TensorShard] = {}
    parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], str, int]]] = {}
    for plan in plans:
        for placement in plan.placements:
            shard = tensors[placement.name] = placement.shard
            parts.setdefault(placement.name, []).append((shard.offset, shard.size, plan.file, placement.begin))
    index: dict[str, dict[str, object]] = {}
    for name, shard in tensors.items():
        elements = sum(prod(size) for _, size, *_ in parts[name])
        assert elements == prod(shard.global_shape), f"{name}: shards hold {elements} of {shard.global_shape}"
        index[name] = {"dtype": NAMES[shard.dtype], "shape": shard.global_shape, "parts": parts[name]}
    return json.dumps({"tensors": index})
