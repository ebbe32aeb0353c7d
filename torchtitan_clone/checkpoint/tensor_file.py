"""Files in the safetensors format, written as a stream: the header first, then one tensor after another.

The library of that name writes only what is in memory all at once. What was written is read back through it, from
disk, and compared: so a file that is closed without an error can be read by everybody and holds what it was given.
Source: the format is described at https://github.com/huggingface/safetensors.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a file, without its values; `dtype` is the format's word for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The type of its numbers; None for one that torch has not."""
        return DTYPES.get(self.dtype)

    @property
    def item_bytes(self) -> int:
        """Bytes of one of its numbers."""
        return DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.item_bytes


def entry_for(name: str, *, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """The entry of a tensor that is to be written."""
    return Entry(name=name, dtype=NAMES[dtype], shape=tuple(shape))


def write_tensor_file(path: Path, *, entries: Sequence[Entry], tensors: Iterable[Tensor]) -> None:
    """Writes the tensors of the entries, in their order, forces the file to disk and reads it back.

    No more than one of them is asked for at a time. OSError says what went wrong.
    """
    checksums: dict[str, int] = {}
    with path.open("xb") as file:
        file.write(file_header(entries, metadata={}))
        for entry, tensor in zip(entries, tensors, strict=True):
            assert (entry.torch_dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), (entry, tensor)
            content = bytes_of(tensor).numpy().data
            file.write(content)
            checksums[entry.name] = zlib.crc32(content)
        file.flush()
        os.fsync(file.fileno())
        # So that what is read back comes from the disk, as far as its own cache allows.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if (wrong := _difference(path, entries=entries, checksums=checksums)) is not None:
        raise OSError(f"{path.name} does not read back as it was written: {wrong}")


def _difference(path: Path, *, entries: Sequence[Entry], checksums: Mapping[str, int]) -> str | None:
    """In what the file is not what was written; None where it is."""
    from safetensors import SafetensorError

    try:
        found = {entry.name: entry for entry in read_entries(path)}
        if sorted(found) != sorted(checksums):
            return f"it has the tensors {', '.join(sorted(found))}"
        with open_tensors(path) as file:
            for entry in entries:
                content = bytes_of(file.get_tensor(entry.name)).numpy().data
                if found[entry.name] != entry or zlib.crc32(content) != checksums[entry.name]:
                    return entry.name
    except SafetensorError as error:
        return str(error)
    return None


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's values as one row of bytes; a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def open_tensors(path: Path) -> Any:
    """The library's reader, a context manager. SafetensorError where the file is damaged."""
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def read_entries(path: Path) -> list[Entry]:
    """What is in a file, from its header. SafetensorError where it is damaged, or shorter than the header says."""
    with open_tensors(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
        return [Entry(name=name, dtype=s.get_dtype(), shape=tuple(s.get_shape())) for name, s in slices.items()]


def file_header(entries: Sequence[Entry], *, metadata: Mapping[str, str]) -> bytes:
    """Length, and JSON filled up with spaces, so that the values start at a multiple of 8."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
