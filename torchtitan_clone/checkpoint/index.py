"""Reads the index of a checkpoint: which file holds which part of which tensor. Nothing in it is trusted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.commit import CorruptCheckpointError, Manifest, read_document, read_manifest, reading
from torchtitan_clone.checkpoint.layout import INDEX_FILE
from torchtitan_clone.checkpoint.tensor_file import DTYPES, is_shape
from torchtitan_clone.documents import MAX_INTEGER, Value, escape
from torchtitan_clone.ops.dtensor_shards import TensorShard

MAX_INDEX_BYTES = 1 << 30
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


def read_index(folder: Path, *, manifest: Manifest | None = None) -> Index:
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
            case [list(offset), list(size), str(file), int(begin)] if _is_inside(offset, size, shape=shape):
                if file in manifest.files and type(begin) is int and 0 <= begin <= MAX_INTEGER:
                    shard = TensorShard(
                        offset=tuple(offset), size=tuple(size), global_shape=shape, dtype=dtype, device_type="cpu"
                    )
                    shards.append((file, begin, shard))
                    continue
        rule = f"must be [offset, size, file of the manifest, first byte], in a tensor of shape {list(shape)}"
        entry["parts"].refuse(f"item {len(shards)} {rule}")
    return SavedTensor(dtype=dtype, shape=shape, shards=shards)


def _is_inside(offset: list[object], size: list[object], *, shape: torch.Size) -> bool:
    """Written out, without a Value for each number: an index may have a million parts."""
    return len(offset) == len(size) == len(shape) and all(
        type(first) is int and type(count) is int and first >= 0 <= count and first + count <= whole
        for first, count, whole in zip(offset, size, shape, strict=True)
    )


def check_parts(name: str, tensor: SavedTensor) -> None:
    """Checks that the parts cover every element of a tensor once; CorruptCheckpointError otherwise."""
    parts = [(shard.offset, shard.size) for *_, shard in tensor.shards if prod(shard.size)]
    if (found := sum(prod(size) for _, size in parts)) != prod(tensor.shape):
        what = f"{found:,} of the {prod(tensor.shape):,} elements"
        raise CorruptCheckpointError(f"{INDEX_FILE}: {escape(name)}: its parts have {what}")
    if _overlap(parts, num_dimensions=len(tensor.shape)):
        raise CorruptCheckpointError(f"{INDEX_FILE}: {escape(name)}: its parts overlap")


def _overlap(parts: list[Part], *, num_dimensions: int, dimension: int = 0) -> bool:
    """Returns whether parts overlap, in O(n log n): meshes cut tensors into rows, and rows into columns."""
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
