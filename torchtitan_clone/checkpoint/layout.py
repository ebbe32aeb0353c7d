"""Which rank writes which part of which tensor, and where it stands in that rank's file.

torch.distributed.checkpoint's planner decides who writes what, so that nothing is written twice. Every rank writes one
safetensors file; `index.json` says where the parts of each tensor are. Both are plain data: reading them runs no code,
and torch's own HuggingFaceStorageReader reads the files too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from torchtitan_clone.checkpoint.tensor_file import NAMES, entry_for, file_header

INDEX_FILE = "index.json"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The part of a tensor that a rank writes, and its bytes [begin, end) in the rank's file."""

    item: WriteItem
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One rank's file: what stands before the numbers, and where each part of a tensor goes."""

    file: str
    header: bytes
    placements: Sequence[Placement]

    @property
    def bytes(self) -> int:
        """Size of the whole file."""
        return self.placements[-1].end if self.placements else len(self.header)

    def sources(self, state: dict[str, Tensor]) -> Iterator[tuple[Placement, Tensor]]:
        """Every placement with this rank's numbers for it, as one row of bytes; a view wherever that is possible."""
        for place in self.placements:
            part = find_state_dict_object(state, place.item.index).detach()
            yield place, part.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this rank writes; rank 0 also knows the index of all files, as JSON, and their bytes together."""

    layout: Layout
    index: str
    total_bytes: int


def plan_save(state: dict[str, Tensor]) -> Plan:
    """Agrees with all ranks on who writes what; a collective. It holds as long as names, shapes and splits do."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    local_plans: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(planner.create_local_plan(), local_plans)
    plans: list[Any] = [None] * world_size
    if local_plans is not None:
        layouts = [build_layout(plan, rank=r) for r, plan in enumerate(planner.create_global_plan(local_plans)[0])]
        total = sum(layout.bytes for layout in layouts)
        plans = [Plan(layout=layout, index="", total_bytes=total) for layout in layouts]
        plans[0] = Plan(layout=layouts[0], index=_index(layouts), total_bytes=total)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans)
    return mine[0]


def plan_alone(state: dict[str, Tensor]) -> Plan:
    """The same for a process without others; only names, types and shapes count, so that tensors may lie on meta."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=True)
    layout = build_layout(planner.create_global_plan([planner.create_local_plan()])[0][0], rank=0)
    return Plan(layout=layout, index=_index([layout]), total_bytes=layout.bytes)


def build_layout(plan: SavePlan, *, rank: int) -> Layout:
    """Places the parts one behind the other, wide types first, so that each is aligned without gaps between them."""
    items = sorted(plan.items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn))
    assert len({item.index.fqn for item in items}) == len(items), "a rank has one part of a tensor"
    sizes = [prod(_chunk(item).sizes) * _dtype(item).itemsize for item in items]
    header = _header(items)
    placements, begin = [], len(header)
    for item, size in zip(items, sizes, strict=True):
        placements.append(Placement(item=item, begin=begin, end=begin + size))
        begin += size
    return Layout(file=f"rank-{rank}.safetensors", header=header, placements=placements)


def _header(items: Sequence[WriteItem]) -> bytes:
    """safetensors' header; where each part lies in its tensor is noted as torch's reader expects it."""
    offsets = {item.index.fqn: {"saved_offsets": list(_chunk(item).offsets)} for item in items}
    entries = [entry_for(item.index.fqn, dtype=_dtype(item), shape=_chunk(item).sizes) for item in items]
    return file_header(entries, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})


def _index(layouts: Sequence[Layout]) -> str:
    """Of every tensor its type, its shape, and its parts: offsets, sizes, file, first byte in the file."""
    tensors: dict[str, Any] = {}
    for layout in layouts:
        for place in layout.placements:
            item, chunk = place.item, _chunk(place.item)
            assert item.tensor_data is not None
            entry = {"dtype": NAMES[_dtype(item)], "shape": list(item.tensor_data.size), "parts": []}
            part = [list(chunk.offsets), list(chunk.sizes), layout.file, place.begin]
            tensors.setdefault(item.index.fqn, entry)["parts"].append(part)
    return json.dumps({"tensors": tensors})


def _chunk(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype
