"""Reads folders of weights in the format of the Hugging Face hub: config.json and safetensors files.

`TensorSlices` map our tensors to the hub's, see ops/tensor_slices.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan_clone.checkpoint import tensor_file
from torchtitan_clone.checkpoint.tensor_file import Entry
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.downloads import describe_download, find_downloaded
from torchtitan_clone.documents import DocumentError, Value, find_member, parse_json, read_member, shorten
from torchtitan_clone.hub.quantized import MXFP4_BLOCKS, MXFP4_SCALES, SCALES, BlockScaled, Mxfp4
from torchtitan_clone.hub.vocabulary import ResizedRows
from torchtitan_clone.ops.dtensor_shards import local_shard_and_offset
from torchtitan_clone.ops.tensor_slices import Sliceable, TensorSlice, TensorSlices

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
_COMPARED_BYTES = 1 << 24
Tensors = Mapping[str, Tensor]
Entries = Sequence[Entry]


@dataclass(frozen=True, kw_only=True)
class WeightFolder:
    """A readable folder of weights: its config.json, its tensors, and the file that holds each of them."""

    path: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]
    files: Mapping[str, Path]
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows in the files of tensors that have another number of them here."""

    def with_rows(self, names: Iterable[str], *, count: int) -> "tuple[WeightFolder, list[str]]":
        """Returns the folder with `count` rows in tensors of these names, and what was changed in which."""
        found = {name: self.entries[name].shape for name in names if name in self.entries}
        rows = {name: shape[0] for name, shape in found.items() if len(shape) == 2 and shape[0] not in (0, count)}
        entries = {name: replace(self.entries[name], shape=(count, found[name][1])) for name in rows}
        texts = [
            f"{name} has {size:,} rows, of which the last {size - count:,} are left out"
            if size > count
            else f"{name} has {size:,} rows; {count - size:,} more are drawn with their mean and covariance"
            for name, size in sorted(rows.items())
        ]
        return replace(self, entries={**self.entries, **entries}, rows=rows), texts

    def stored_as(self, name: str) -> str:
        """Returns the name of the tensor that holds the values of a tensor, which need not be in the folder."""
        is_packed = name not in self.entries and f"{name}{MXFP4_SCALES}" in self.entries
        return f"{name}{MXFP4_BLOCKS}" if is_packed else name

    def scales_of(self, name: str) -> Entry | None:
        """Returns the scales of a tensor that is stored in 8 bits, as by DeepSeek V3, or in 4; None if it has none."""
        entry = self.entries.get(name)
        if entry is None:
            return self.entries.get(f"{name}{MXFP4_SCALES}")
        is_quantized = entry.torch_dtype == torch.float8_e4m3fn and len(entry.shape) == 2
        return self.entries.get(f"{name}{SCALES}") if is_quantized else None

    def fill(self, tensors: Tensors, *, slices: TensorSlices) -> None:
        """Copies the values into our tensors, complete ones or DTensors; reads little more than their shards."""
        needed: dict[Path, list[tuple[str, TensorSlice]]] = {}
        for name in tensors:
            for part in (part for part in slices[name] if not part.is_copy):
                if not part.is_optional or part.source in self.entries:
                    needed.setdefault(self.files[self.stored_as(part.source)], []).append((name, part))
        boxes = {name: local_shard_and_offset(tensor) for name, tensor in tensors.items()}
        for path, parts in needed.items():
            with torch.no_grad(), safe_open(path, framework="pt") as file:
                for name, part in parts:
                    box, offset = boxes[name]
                    overlap = part.overlap(tensors[name].shape, offset=offset, size=box.shape)
                    if overlap is not None:
                        with self._open(part.source, file.get_slice(self.stored_as(part.source))) as source:
                            overlap.in_box(box).copy_(overlap.read(source))

    def has_equal_values(self, name: str, other: str) -> bool:
        """Returns whether two tensors of the folder are equal, bit by bit; reads rows until they differ."""
        one, two = self.entries[name], self.entries[other]
        if (one.shape, one.torch_dtype) != (two.shape, two.torch_dtype):
            return False
        size = one.shape[0] if one.shape else 1
        rows = max(1, _COMPARED_BYTES * size // max(1, one.num_bytes))
        with safe_open(self.files[name], framework="pt") as a, safe_open(self.files[other], framework="pt") as b:
            first, second = (
                file.get_slice(key) if one.shape else file.get_tensor(key).reshape(1)
                for file, key in ((a, name), (b, other))
            )
            return all(
                torch.equal(first[row : row + rows].view(torch.uint8), second[row : row + rows].view(torch.uint8))
                for row in range(0, size, rows)
            )

    @contextmanager
    def _open(self, name: str, values: Sliceable) -> Iterator[Sliceable]:
        """Yields a tensor of a file, or its values times its scales, which another file may hold."""
        scales = self.scales_of(name)
        if name in self.rows:
            yield ResizedRows(values, name=name, rows=self.rows[name], columns=self.entries[name].shape[1])
            return
        if scales is None:
            yield values
            return
        with safe_open(self.files[scales.name], framework="pt") as file:
            kind = BlockScaled if name in self.entries else Mxfp4
            yield kind(values, scales=file.get_slice(scales.name))


def open_weight_folder(path: Path) -> WeightFolder:
    """Reads config.json, the index and the headers. ConfigError if the folder is missing, incomplete or damaged."""
    path = find_downloaded(path, repository="model")
    if not path.is_dir():
        remedy = describe_download(str(path), repository="model") or "; give the folder of a Hugging Face model"
        raise ConfigError(f"{path}: there is no such folder{remedy}")
    try:
        config = _read_table(path, CONFIG_FILE)
        if config is None:
            raise DocumentError(f"there is no {CONFIG_FILE} in it")
        index = _read_table(path, INDEX_FILE)
        weight_map = {} if index is None else _weight_map(index)
        files = _weight_files(path, weight_map=weight_map)
        tensors = _choose_tensors({name: _entries_of(file, name=name) for name, file in files.items()}, weight_map)
    except (DocumentError, OSError) as error:
        raise ConfigError(f"{path}: {error}; correct the folder, or copy or download it again") from error
    entries = {name: entry for name, (_, entry) in tensors.items()}
    holders = {name: files[file_name] for name, (file_name, _) in tensors.items()}
    return WeightFolder(path=path, config=cast("Mapping[str, Any]", config.value), entries=entries, files=holders)


def _weight_map(index: Value) -> dict[str, str]:
    """Returns the name of the file of each tensor: a plain name, so that it is a file of the folder."""
    if not (weight_map := index.entries().get("weight_map")) or not weight_map.entries():
        raise DocumentError(f"{INDEX_FILE} has no weight_map")
    return {name: file.file_name() for name, file in weight_map.entries().items()}


def _weight_files(path: Path, *, weight_map: Mapping[str, str]) -> dict[str, Path]:
    """Returns the files that the index names, or else all of the folder."""
    names = sorted(set(weight_map.values())) or sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise DocumentError("there is no .safetensors file in it")
    files = {name: find_member(path, name=name) for name in names}
    if absent := [name for name, file in files.items() if file is None]:
        raise DocumentError(f"{shorten(', '.join(absent))} stand in {INDEX_FILE}, but not in the folder")
    return {name: file for name, file in files.items() if file is not None}


def _choose_tensors(files: Mapping[str, Entries], weight_map: Mapping[str, str]) -> dict[str, tuple[str, Entry]]:
    """Returns the name of the file and the entry of each tensor; the index decides where two files hold one."""
    tensors: dict[str, tuple[str, Entry]] = {}
    for file_name, entries in files.items():
        for entry in entries:
            if weight_map.get(entry.name, file_name) != file_name:
                continue
            if entry.name in tensors:
                rule = f"{tensors[entry.name][0]} and {file_name} both hold it"
                raise DocumentError(f"{shorten(entry.name)}: {rule}; remove one of them, or add {INDEX_FILE}")
            tensors[entry.name] = file_name, entry
    if absent := [name for name in weight_map if name not in tensors]:
        raise DocumentError(f"{shorten(', '.join(absent))} stand in {INDEX_FILE}, but not in the files that it names")
    return tensors


def _entries_of(file: Path, *, name: str) -> list[Entry]:
    try:
        entries = [*tensor_file.read_header(file).entries.values()]
        with safe_open(file, framework="pt"):  # the library refuses some headers that read_header() accepts
            pass
    except (OSError, DocumentError, SafetensorError) as error:
        raise DocumentError(f"{name} cannot be read: {shorten(str(error))}") from error
    if unknown := [entry for entry in entries if entry.torch_dtype is None]:
        problem = f"{shorten(unknown[0].name)} has type {shorten(unknown[0].dtype)}"
        raise DocumentError(f"{name}: {problem}; quantized weights cannot be trained on")
    return entries


def _read_table(path: Path, name: str) -> Value | None:
    content = read_member(path, name=name)
    if content is None:
        return None
    table = parse_json(content, where=name)
    table.entries()  # refuses anything but a table
    return table
