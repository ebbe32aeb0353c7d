"""Which rank writes which shard of which tensor, and where it is in that rank's file.

The planner of torch.distributed.checkpoint decides who writes what, so that replicated values are written once. A plain
tensor counts as replicated over all ranks that have it. Every rank writes one safetensors file; `index.json` maps each
tensor to its shards. Both are plain data: reading them runs no code, and torch's HuggingFaceStorageReader can read the
files too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from torchtitan_clone.checkpoint.tensor_file import NAMES, bytes_of, entry_for, file_header

INDEX_FILE = "index.json"


class IndexEntry(TypedDict):
    """A tensor in `index.json`; each of its "parts" is a shard: offsets, sizes, file, first byte in the file."""

    dtype: str
    shape: list[int]
    parts: list[tuple[list[int], list[int], str, int]]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A shard that a rank writes, and its bytes [begin, end) in the rank's file."""

    item: WriteItem
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The file of one rank: its header, and the position of each shard."""

    file: str
    header: bytes
    placements: Sequence[Placement]

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.placements[-1].end if self.placements else len(self.header)

    def shards(self, state: dict[str, Tensor]) -> Iterator[tuple[Placement, Tensor]]:
        """Yields every placement with its values as a 1-D tensor of bytes; a view if the values are contiguous."""
        for placement in self.placements:
            yield placement, bytes_of(find_state_dict_object(state, placement.item.index))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this rank writes. `total_bytes` is over all ranks; only rank 0 has the `index` of all files, as JSON."""

    layout: Layout
    index: str
    total_bytes: int


def plan_save(state: dict[str, Tensor]) -> Plan:
    """Plans with all ranks who writes what; valid as long as names, shapes and shardings stay. Collective."""
    rank = dist.get_rank()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    gathered: list[SavePlan | None] = [None] * dist.get_world_size()
    dist.gather_object(planner.create_local_plan(), gathered if rank == 0 else None)
    plans: list[Plan | None] = [None] * dist.get_world_size()
    if rank == 0:
        local_plans = [plan for plan in gathered if plan is not None]
        layouts = [build_layout(plan, rank=r) for r, plan in enumerate(planner.create_global_plan(local_plans)[0])]
        total = sum(layout.bytes for layout in layouts)
        plans = [Plan(layout=layout, index="", total_bytes=total) for layout in layouts]
        plans[0] = Plan(layout=layouts[0], index=_index(layouts), total_bytes=total)
    received: list[Plan | None] = [None]
    dist.scatter_object_list(received, plans)
    assert received[0] is not None
    return received[0]


def plan_save_offline(state: dict[str, Tensor]) -> Plan:
    """Plans a save by one process without a process group. Needs no values: tensors may be on the meta device."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=True)
    layout = build_layout(planner.create_global_plan([planner.create_local_plan()])[0][0], rank=0)
    return Plan(layout=layout, index=_index([layout]), total_bytes=layout.bytes)


def build_layout(plan: SavePlan, *, rank: int) -> Layout:
    """Places the shards one after another, largest item size first, so that all are aligned without padding."""
    items = sorted(plan.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    assert len({item.index.fqn for item in items}) == len(items), "a rank must have one shard of each tensor"
    sizes = [prod(_chunk(item).sizes) * _dtype(item).itemsize for item in items]
    header = _header(items)
    placements: list[Placement] = []
    begin = len(header)
    for item, size in zip(items, sizes, strict=True):
        placements.append(Placement(item=item, begin=begin, end=begin + size))
        begin += size
    return Layout(file=f"rank-{rank}.safetensors", header=header, placements=placements)


def _header(items: Sequence[WriteItem]) -> bytes:
    """Returns the safetensors header, with the offsets of the shards where torch's reader expects them."""
    offsets = {item.index.fqn: {"saved_offsets": list(_chunk(item).offsets)} for item in items}
    entries = [entry_for(item.index.fqn, dtype=_dtype(item), shape=_chunk(item).sizes) for item in items]
    return file_header(entries, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})


def _index(layouts: Sequence[Layout]) -> str:
    tensors: dict[str, IndexEntry] = {}
    for layout in layouts:
        for placement in layout.placements:
            item = placement.item
            chunk = _chunk(item)
            assert item.tensor_data is not None
            entry: IndexEntry = {"dtype": NAMES[_dtype(item)], "shape": list(item.tensor_data.size), "parts": []}
            part = (list(chunk.offsets), list(chunk.sizes), layout.file, placement.begin)
            tensors.setdefault(item.index.fqn, entry)["parts"].append(part)
    return json.dumps({"tensors": tensors})


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype
