"""Files in the safetensors format, written as a stream: the library can only write tensors that are all in memory.

Source: https://github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.writer import DIGEST, chunks_of, digest_of, write_file
from torchtitan_clone.documents import MAX_BYTES, DocumentError, Value, escape, open_regular, parse_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
MAX_HEADER = 100_000_000  # bytes that the format allows
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**62


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a file, without its values; `dtype` is the format's name, `torch_dtype` None if torch lacks it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.dtype)

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class Header:
    """The tensors of a file, which fill it without gaps or overlaps; `begins` are their first bytes in the file."""

    entries: Mapping[str, Entry]
    begins: Mapping[str, int]
    metadata: Mapping[str, str]


Span = tuple[int, int]
"""First and last (exclusive) byte of a tensor after the header."""


def entry_for(name: str, *, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """Returns the entry of a tensor to be written; TypeError if the format does not support its type."""
    if dtype not in NAMES:
        known = ", ".join(str(each)[6:] for each in NAMES)
        remedy = "convert it, or register the buffer with persistent=False"
        raise TypeError(f"{name}: a tensor of type {dtype} cannot be saved, only {known}; {remedy}")
    return Entry(name=name, dtype=NAMES[dtype], shape=tuple(shape))


def exported_dtype(name: str, dtype: torch.dtype, *, wanted: torch.dtype) -> torch.dtype:
    """Returns the type in which a tensor of the model is exported: the wanted one for weights in floating point.

    The biases that balance routers stay: they choose experts by differences that bfloat16 does not have.
    """
    return wanted if dtype.is_floating_point and not name.endswith(".expert_bias") else dtype


def write_tensor_file(path: Path, *, entries: Sequence[Entry], tensors: Iterable[Tensor]) -> None:
    """Writes the tensors in the order of their entries, flushes the file to disk and reads it back.

    Holds one tensor at a time. Raises OSError if the disk fails or the values read back differ.
    """
    content = file_content(file_header(entries, metadata={}), _checked(tensors, entries=entries))
    digest = write_file(path, content).digest
    with path.open("rb") as file:
        # Drops the page cache, so that the values are read back from the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        with open_regular(path) as file:
            is_intact = digest_of(file, name=DIGEST) == digest and len(read_header(path).entries) == len(entries)
    except (OSError, DocumentError):
        is_intact = False
    if not is_intact:
        raise OSError(f"{path.name} does not read back as written; check the disk {path.parent} is on")


def _checked(tensors: Iterable[Tensor], *, entries: Sequence[Entry]) -> Iterator[Tensor]:
    for entry, tensor in zip(entries, tensors, strict=True):
        assert (entry.torch_dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), (entry, tensor)
        yield tensor


def file_content(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file in chunks, one tensor after another."""
    yield header
    for tensor in tensors:
        yield from chunks_of(bytes_of(tensor.cpu()).numpy().data)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the values as a 1-D tensor of bytes; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def read_header(path: Path) -> Header:
    """Returns the header of a file. DocumentError if it is not a complete file of this format, OSError if unreadable.

    Stricter than the library, which an untrusted header can make read beyond a tensor's own bytes or not at all.
    """
    with BufferedReader(open_regular(path)) as file:
        return header_of(file, where=path.name)


def header_of(file: "BufferedReader[Any]", *, where: str) -> Header:
    """Returns the header of an open file, named `where` in errors; DocumentError as read_header()."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= min(MAX_HEADER, size - _LENGTH_BYTES):
        raise DocumentError(f"{where}: not a safetensors file: of {size:,} bytes, {length:,} would be its header")
    document = parse_json(file.read(length), where=where)
    tensors = dict(document.plain_entries())
    metadata = Value(tensors.pop("__metadata__", None) or {}, where=f"{where}: __metadata__").entries()
    first = _LENGTH_BYTES + length
    entries = [_parse_entry(value, name=name, where=where) for name, value in tensors.items()]
    _check_spans(entries, size=size - first, where=where)
    return Header(
        entries={entry.name: entry for entry, _ in entries},
        begins={entry.name: first + begin for entry, (begin, _) in entries},
        metadata={key: text.text(max_chars=MAX_BYTES) for key, text in metadata.items()},
    )


def _parse_entry(value: object, *, name: str, where: str) -> tuple[Entry, Span]:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)], **others} if (
            not others and is_shape(shape) and type(begin) is int and type(end) is int
        ):
            return Entry(name=name, dtype=dtype, shape=tuple(shape)), (begin, end)
        case _:
            rule = f"at most {MAX_DIMENSIONS} dimensions and {MAX_ELEMENTS} elements, and data_offsets of two integers"
            return Value(value, where=f"{where}: {name}").refuse(f"must be a table of dtype, a shape with {rule}")


def is_shape(value: Sequence[object]) -> bool:
    """Returns whether this is the shape of a tensor, whose size torch can compute."""
    sizes = [size for size in value if type(size) is int and size >= 0]
    return len(sizes) == len(value) <= MAX_DIMENSIONS and prod(filter(None, sizes)) <= MAX_ELEMENTS


def _check_spans(entries: Sequence[tuple[Entry, Span]], *, size: int, where: str) -> None:
    position = 0
    for entry, (begin, end) in sorted(entries, key=lambda item: item[1]):
        if begin != position or end < begin or (entry.torch_dtype and end - begin != entry.num_bytes):
            what = f"{begin} to {end} for {entry.dtype} {list(entry.shape)} after byte {position}"
            place = f"{where}: {entry.name}: data_offsets {what}"
            raise DocumentError(f"{escape(place)}: tensors must fill the file one after another")
        position = end
    if position != size:
        raise DocumentError(f"{where}: its tensors have {position:,} bytes, and the file has {size:,} for them")


def file_header(entries: Sequence[Entry], *, metadata: Mapping[str, str]) -> bytes:
    """Returns the header: its length and JSON padded with spaces, so that the values start at a multiple of 8."""
    table: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt", **metadata}}
    spans = pairwise(accumulate((entry.num_bytes for entry in entries), initial=0))
    for entry, span in zip(entries, spans, strict=True):
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
