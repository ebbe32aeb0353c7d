"""What a checkpoint contains: the file of each rank, the index of all files, and the names of tensors.

`index.json` maps each tensor to its shards; torch's HuggingFaceStorageReader can read the files too. A plain tensor
counts as replicated over all ranks that have it. Nothing that is read is trusted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.folder import (
    CorruptCheckpointError,
    Manifest,
    Place,
    read_document,
    read_manifest,
    reading,
)
from torchtitan_clone.checkpoint.tensor_file import DTYPES, NAMES, bytes_of, entry_for, file_header, is_shape
from torchtitan_clone.comm.json_collectives import gather_json, scatter_json
from torchtitan_clone.documents import MAX_INTEGER, Value, escape
from torchtitan_clone.ops.dtensor_shards import (
    TensorShard,
    describe_shard,
    local_shard,
    shards_from_json,
    shards_to_json,
)

MODEL = "model/"
OPTIMIZER = "optimizer/"
OUTER = "outer/"
EMA = "ema/"
RNG = "rng/"
"""What names of tensors begin with; those of random states contain the rank."""
CPU = f"{RNG}cpu/"
CUDA = f"{RNG}cuda/"
MAX_STATE_BYTES = 1 << 16
INDEX_FILE = "index.json"
MAX_INDEX_BYTES = 1 << 30
OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Entry of a header, as torch's reader expects it: the offset of each shard."""


# rank-R.safetensors, where n is the length of the JSON, padded so that values start at a multiple of 8:
#
#   0        8           8 + n = begin of the first placement                               end of the last
#   | n      | JSON      | values, 8-byte types first | 4-byte types | 2-byte types | 1-byte |
#   |<---- header ------>|<-- placement -->|<-- placement -->| ...


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A shard that a rank writes, and its bytes [begin, end) in the rank's file."""

    name: str
    shard: TensorShard
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """What one rank writes. `total_bytes` is over all ranks; only rank 0 has the `index` of all files, as JSON."""

    file: str
    header: bytes
    placements: Sequence[Placement]
    index: str = ""
    total_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.placements[-1].end if self.placements else len(self.header)

    def shards(self, state: Mapping[str, Tensor]) -> Iterator[tuple[Placement, Tensor]]:
        """Yields every placement with its values as a 1-D tensor of bytes; a view if the values are contiguous."""
        for placement in self.placements:
            yield placement, bytes_of(local_shard(state[placement.name]))


def file_of_rank(rank: int) -> str:
    """Returns the name of what a rank writes."""
    return f"rank-{rank}.safetensors"


def lay_out(state: Mapping[str, Tensor]) -> FileLayout:
    """Decides with all ranks who writes what; valid as long as names, shapes and shardings stay. Collective."""
    shards = {name: describe_shard(tensor) for name, tensor in state.items()}
    layouts = _layouts([shards_from_json(value) for value in gather_json(shards_to_json(shards))])
    written = [[[placement.name for placement in layout.placements], layout.total_bytes] for layout in layouts]
    names, total_bytes = scatter_json(written).items(count=2)
    own = {name: shards[name] for name in (value.choice(*shards) for value in names.items())}
    index = layouts[0].index if layouts else ""
    return replace(_lay_out_file(own, rank=dist.get_rank()), total_bytes=total_bytes.integer(), index=index)


def lay_out_offline(state: Mapping[str, Tensor]) -> FileLayout:
    """Lays out the file of one process without a process group; tensors may be on the meta device."""
    return _layouts([{name: describe_shard(tensor) for name, tensor in state.items()}])[0]


def _layouts(shards_of_ranks: Sequence[Mapping[str, TensorShard]]) -> list[FileLayout]:
    if not shards_of_ranks:
        return []
    files = [_lay_out_file(shards, rank=rank) for rank, shards in enumerate(_without_replicas(shards_of_ranks))]
    total_bytes = sum(layout.bytes for layout in files)
    layouts = [replace(layout, total_bytes=total_bytes) for layout in files]
    return [replace(layouts[0], index=_index(layouts)), *layouts[1:]]


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


def _lay_out_file(shards: Mapping[str, TensorShard], *, rank: int) -> FileLayout:
    """Places the shards one after another, largest item size first, so that all are aligned without padding."""
    names = sorted(shards, key=lambda name: (-shards[name].dtype.itemsize, name))
    entries = [entry_for(name, dtype=shards[name].dtype, shape=shards[name].size) for name in names]
    offsets = {name: {"saved_offsets": shards[name].offset} for name in names}
    header = file_header(entries, metadata={OFFSETS_KEY: json.dumps(offsets)})
    ends = accumulate((entry.num_bytes for entry in entries), initial=len(header))
    spans = zip(names, pairwise(ends), strict=True)
    placements = [Placement(name=name, shard=shards[name], begin=begin, end=end) for name, (begin, end) in spans]
    return FileLayout(file=file_of_rank(rank), header=header, placements=placements)


def _index(layouts: Sequence[FileLayout]) -> str:
    """Returns the content of `index.json`; the "parts" of a tensor are offset, size, file and first byte of shards."""
    tensors: dict[str, TensorShard] = {}
    parts: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], str, int]]] = {}
    for layout in layouts:
        for placement in layout.placements:
            shard = tensors[placement.name] = placement.shard
            parts.setdefault(placement.name, []).append((shard.offset, shard.size, layout.file, placement.begin))
    index: dict[str, dict[str, object]] = {}
    for name, shard in tensors.items():
        elements = sum(prod(size) for _, size, *_ in parts[name])
        assert elements == prod(shard.global_shape), f"{name}: shards hold {elements} of {shard.global_shape}"
        index[name] = {"dtype": NAMES[shard.dtype], "shape": shard.global_shape, "parts": parts[name]}
    return json.dumps({"tensors": index})


Part = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of a checkpoint; `shards` are the file of each, its first byte there, and the shard."""

    dtype: torch.dtype
    shape: torch.Size
    shards: Sequence[tuple[str, int, TensorShard]]

    def empty(self, *, device: str = "cpu") -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


Index = dict[str, SavedTensor]


def read_index(folder: Place, *, manifest: Manifest | None = None) -> Index:
    """Returns the tensors of a checkpoint by name; CorruptCheckpointError if the index is not valid.

    Parts lie within their tensor, in files of the manifest; `check_parts` and `verify` check the rest.
    """
    manifest = manifest or read_manifest(folder)
    with reading(INDEX_FILE):
        document = read_document(folder, INDEX_FILE, manifest=manifest, max_bytes=MAX_INDEX_BYTES)
        tensors = document.table("tensors")["tensors"].entries()
        return {name: _saved_tensor(each, manifest=manifest) for name, each in tensors.items()}


def _saved_tensor(value: Value, *, manifest: Manifest) -> SavedTensor:
    entry = value.table("dtype", "shape", "parts")
    dtype = DTYPES[entry["dtype"].choice(*DTYPES)]
    if not is_shape(entry["shape"].plain_items()):
        entry["shape"].refuse("must be the shape of a tensor")
    shape = torch.Size(entry["shape"].integers())
    shards: list[tuple[str, int, TensorShard]] = []
    for part in entry["parts"].plain_items():
        match part:
            case [list(offset), list(size), str(file), int(begin)] if is_inside(offset, size, shape=shape):
                if file in manifest.files and type(begin) is int and 0 <= begin <= MAX_INTEGER:
                    shard = TensorShard(
                        offset=tuple(offset), size=tuple(size), global_shape=shape, dtype=dtype, device_type="cpu"
                    )
                    shards.append((file, begin, shard))
                    continue
        rule = f"must be [offset, size, file of the manifest, first byte], in a tensor of shape {list(shape)}"
        entry["parts"].refuse(f"item {len(shards)} {rule}")
    return SavedTensor(dtype=dtype, shape=shape, shards=shards)


def is_inside(offset: Sequence[object], size: Sequence[object], *, shape: Sequence[int]) -> bool:
    """Returns whether a part of this offset and size is in a tensor of this shape."""
    # Without a Value for each number: an index may have a million parts.
    return len(offset) == len(size) == len(shape) and all(
        type(first) is int and type(count) is int and first >= 0 <= count and first + count <= whole
        for first, count, whole in zip(offset, size, shape, strict=True)
    )


def check_parts(name: str, tensor: SavedTensor, *, where: str = INDEX_FILE) -> None:
    """Checks that the parts of a tensor cover every element once; CorruptCheckpointError, which names where, if not."""
    parts = [(shard.offset, shard.size) for *_, shard in tensor.shards if prod(shard.size)]
    if (covered := sum(prod(size) for _, size in parts)) != prod(tensor.shape):
        what = f"{covered:,} of the {prod(tensor.shape):,} elements"
        raise CorruptCheckpointError(f"{where}: {escape(name)}: its parts have {what}")
    if _overlap(parts, num_dimensions=len(tensor.shape)):
        raise CorruptCheckpointError(f"{where}: {escape(name)}: its parts overlap")


def _overlap(parts: list[Part], *, num_dimensions: int, dimension: int = 0) -> bool:
    """Returns whether parts overlap, in O(n log n): meshes cut tensors into rows, and rows into columns."""
    # Parts sorted along one dimension fall into groups that do not touch; within a group, the next dimension decides:
    #
    #   +---+-------+
    #   | a |   b   |  dimension 0 separates {a, b} from {c, d}, dimension 1 then a from b and c from d
    #   +---+--+----+
    #   |  c   | d  |
    #   +------+----+
    if len(parts) < 2 or dimension == num_dimensions:
        return len(parts) > 1
    groups: list[list[Part]] = []
    end = 0
    for part in sorted(parts, key=lambda part: part[0][dimension]):
        if not groups or part[0][dimension] >= end:
            groups.append([])
        groups[-1].append(part)
        end = max(end, part[0][dimension] + part[1][dimension])
    return any(_overlap(group, num_dimensions=num_dimensions, dimension=dimension + 1) for group in groups)


def random_state() -> dict[str, Tensor]:
    """Returns copies of the states of this rank's random number generators, as tensors of a checkpoint."""
    rank = dist.get_rank()
    states = {f"{CPU}{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{CUDA}{rank}"] = torch.cuda.get_rng_state()
    return states


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Sets the states that were loaded. A rank that did not exist when they were saved keeps its own."""
    for name, tensor in state.items():
        if name.startswith(CPU):
            torch.set_rng_state(tensor)
        elif name.startswith(CUDA):
            torch.cuda.set_rng_state(tensor)


def is_random_state(name: str, *, state: Tensor) -> bool:
    """Returns whether a generator accepts these bytes; those for CUDA are checked where there is a GPU."""
    device = "cuda" if name.startswith(CUDA) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return True
    try:
        torch.Generator(device).set_state(state)
    except (RuntimeError, TypeError):
        return False
    return True
