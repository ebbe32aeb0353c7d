"""Reads checkpoints of torch.distributed.checkpoint (DCP) tensor by tensor, and executes nothing of them.

.metadata       a pickle: shape and chunks of each tensor, and the record of each chunk and of each other value
__0_0.distcp    records one after another, each an archive of torch.save, see torch_archive.py
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.folder import CorruptCheckpointError
from torchtitan_clone.checkpoint.format import MAX_INDEX_BYTES, SavedTensor, check_parts, is_inside
from torchtitan_clone.checkpoint.plain_pickle import Built, Name, parse_pickle
from torchtitan_clone.checkpoint.tensor_file import is_shape
from torchtitan_clone.checkpoint.torch_archive import TorchArchive
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, escape, is_plain_name, open_regular, read_regular, shorten
from torchtitan_clone.ops.dtensor_shards import DTYPES, TensorShard

METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    *(("torch", name.removeprefix("torch.")) for name in DTYPES),
}  # fmt: skip
"""All that the pickle of metadata may name, as pairs of module and name."""


@dataclass(frozen=True, kw_only=True)
class _Extent:
    """The bytes of one value in a file."""

    file: str
    begin: int
    length: int


class DcpCheckpoint:
    """The tensors of a checkpoint by name, without their values, and the names of its other values.

    ConfigError if the folder is no such checkpoint. DocumentError, here and from methods, if a file is damaged or holds
    more than plain data; OSError if it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA_FILE
        if not path.exists():
            what = f"{folder} is no checkpoint of torch.distributed.checkpoint: it has no {METADATA_FILE}"
            raise ConfigError(f"{what}; give the step-N folder that torchtitan has saved")
        self.folder = folder
        self._where = str(path)
        content = read_regular(path, max_bytes=MAX_INDEX_BYTES)
        metadata = self._fields(parse_pickle(content, where=self._where, names=_METADATA_NAMES), "Metadata")
        self._records = self._read_records(metadata.get("storage_data"))
        _check_files(folder, self._records.values())
        tensors: dict[str, SavedTensor] = {}
        self.values: set[str] = set()
        for name, entry in self._table(metadata.get("state_dict_metadata")).items():
            if isinstance(entry, Built) and entry.name == f"{_METADATA}.BytesStorageMetadata":
                self.values.add(name)
            else:
                tensors[name] = self._tensor(name, entry)
        self.tensors: Mapping[str, SavedTensor] = tensors

    def read(self, name: str) -> Tensor:
        """Returns a tensor, assembled from its chunks."""
        saved = self.tensors[name]
        full = saved.empty()
        for *_, shard in saved.shards:
            region = tuple(slice(first, first + size) for first, size in zip(shard.offset, shard.size, strict=True))
            full[region] = self._read_shard(name, shard)
        return full

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a value that is a number, or several; DocumentError if there is no such value."""
        if name not in self.values or (record := self._records.get((name, None))) is None:
            raise self._damage(f"has no value {name}")
        value = self._archive(record, name=name).value
        numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
        if any(type(each) not in (int, float) for each in numbers):
            raise DocumentError(f"{self.folder / record.file}: {escape(name)} is no number; save the checkpoint again")
        return numbers

    def _read_shard(self, name: str, shard: TensorShard) -> Tensor:
        record = self._records[name, shard.offset]
        archive = self._archive(record, name=name)
        stored = archive.as_tensor(archive.value)
        if stored is not None and (stored.shape, stored.dtype) == (shard.size, shard.dtype):
            return archive.read(stored)
        what = f"{escape(name)} is not the tensor of {str(shard.dtype)[6:]} {list(shard.size)}"
        raise DocumentError(f"{self.folder / record.file}: {what} that {METADATA_FILE} says; copy the checkpoint again")

    def _archive(self, record: _Extent, *, name: str) -> TorchArchive:
        """Returns what a record of a tensor or of another value holds."""
        with BufferedReader(open_regular(self.folder / record.file)) as file:
            file.seek(record.begin)
            content = file.read(record.length)
        return TorchArchive(BytesIO(content), size=len(content), where=f"{self.folder / record.file}: {shorten(name)}")

    def _damage(self, what: str) -> DocumentError:
        return DocumentError(f"{self._where}: {escape(what)}; copy the checkpoint again")

    def _fields(self, value: object, kind: str) -> Mapping[str, object]:
        """Returns the state of an object of this kind."""
        if isinstance(value, Built) and value.name.rpartition(".")[2] == kind and isinstance(value.state, dict):
            return value.state
        raise self._damage(f"has no {kind} where one must be")

    def _table(self, value: object) -> Mapping[Any, object]:
        if not isinstance(value, dict):
            raise self._damage("has no table where one must be")
        return value

    def _shape(self, value: object) -> tuple[int, ...]:
        match value:
            case Built(name="torch.Size", args=(tuple(sizes),)) if is_shape(sizes):
                return sizes
        raise self._damage("has no shape where one must be")

    def _read_records(self, value: object) -> dict[tuple[str, tuple[int, ...] | None], _Extent]:
        records: dict[tuple[str, tuple[int, ...] | None], _Extent] = {}
        for key, each in self._table(value).items():
            index, info = self._fields(key, "MetadataIndex"), self._fields(each, "_StorageInfo")
            match index.get("fqn"), info:
                case str(name), {
                    "relative_path": str(file), "offset": int(begin), "length": int(length), **others
                } if min(begin, length) >= 0:  # fmt: skip
                    if others:
                        raise self._damage(f"says that an extension of DCP, such as compression, wrote {shorten(name)}")
                    offset = None if index.get("offset") is None else self._shape(index["offset"])
                    records[name, offset] = _Extent(file=file, begin=begin, length=length)
                case _:
                    raise self._damage("has a record without file, offset and length")
        return records

    def _tensor(self, name: object, value: object) -> SavedTensor:
        entry = self._fields(value, "TensorStorageMetadata")
        match name, entry.get("properties"), entry.get("chunks"):
            case str(name), Built(state=(Name(text=dtype), *_)), list(chunks) if dtype in DTYPES:
                pass
            case _:
                raise self._damage("has a tensor without name, type or chunks")
        shape = torch.Size(self._shape(entry.get("size")))
        shards: list[tuple[str, int, TensorShard]] = []
        for chunk in (self._fields(each, "ChunkStorageMetadata") for each in chunks):
            shard = TensorShard(
                offset=self._shape(chunk.get("offsets")), size=self._shape(chunk.get("sizes")), global_shape=shape,
                dtype=DTYPES[dtype], device_type="cpu",
            )  # fmt: skip
            if not is_inside(shard.offset, shard.size, shape=shape):
                raise self._damage(f"has a chunk of {shorten(name)} outside of it")
            if not prod(shard.size):
                continue
            record = self._records.get((name, shard.offset))
            if record is None or record.length < prod(shard.size) * shard.dtype.itemsize:
                what = f"{list(shard.size)} of {dtype[6:]}"
                raise self._damage(f"has no record of {shorten(name)} at {list(shard.offset)} with room for {what}")
            shards.append((record.file, record.begin, shard))
        saved = SavedTensor(dtype=DTYPES[dtype], shape=shape, shards=shards)
        try:
            check_parts(name, saved, where=self._where)
        except CorruptCheckpointError as error:
            raise DocumentError(f"{error}; copy the checkpoint again") from None
        return saved


def _check_files(folder: Path, records: Iterable[_Extent]) -> None:
    """DocumentError unless records are in regular files of the folder, and none overlaps another."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for record in records:
        by_file.setdefault(record.file, []).append((record.begin, record.begin + record.length))
    for file, spans in by_file.items():
        path = folder / file
        if not is_plain_name(file) or not path.is_file():
            raise DocumentError(f"{folder / METADATA_FILE}: names {shorten(file)}, and {folder} has no such file")
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
        spans.sort()
        if (end := max(end for _, end in spans)) > size:
            raise DocumentError(f"{path}: has {size:,} bytes, and {METADATA_FILE} says {end:,}; copy it again")
        if any(before[1] > after[0] for before, after in pairwise(spans)):
            raise DocumentError(f"{folder / METADATA_FILE}: records in {file} overlap; copy the checkpoint again")
