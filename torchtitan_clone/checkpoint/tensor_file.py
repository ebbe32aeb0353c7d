"""Files in the safetensors format, written as a stream: the library can only write tensors that are all in memory.

Source: https://github.com/huggingface/safetensors.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan_clone.checkpoint.writer import DIGEST, digest_of_file, pieces_of, write_file

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def entry_for(name: str, *, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """Returns the entry of a tensor to be written; TypeError if the format does not support its type."""
    if dtype not in NAMES:
        known = ", ".join(str(each)[6:] for each in NAMES)
        remedy = "convert it, or register the buffer with persistent=False"
        raise TypeError(f"{name}: a tensor of type {dtype} cannot be saved, only {known}; {remedy}")
    return Entry(name=name, dtype=NAMES[dtype], shape=tuple(shape))


def exported_dtype(dtype: torch.dtype, *, wanted: torch.dtype) -> torch.dtype:
    """Returns the wanted type for floating-point types; integers and booleans stay."""
    return wanted if dtype.is_floating_point else dtype


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
        is_intact = digest_of_file(path, name=DIGEST) == digest and len(read_entries(path)) == len(entries)
    except OSError:
        is_intact = False
    if not is_intact:
        raise OSError(f"{path.name} does not read back as written; check the disk {path.parent} is on")


def _checked(tensors: Iterable[Tensor], *, entries: Sequence[Entry]) -> Iterator[Tensor]:
    for entry, tensor in zip(entries, tensors, strict=True):
        assert (entry.torch_dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), (entry, tensor)
        yield tensor


def file_content(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file in pieces, one tensor after another."""
    yield header
    for tensor in tensors:
        yield from pieces_of(bytes_of(tensor.cpu()).numpy().data)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the values as a 1-D tensor of bytes; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def read_entries(path: Path) -> list[Entry]:
    """Returns the entries of a file from its header. OSError if the file cannot be read, is not valid or truncated."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
            return [Entry(name=name, dtype=s.get_dtype(), shape=tuple(s.get_shape())) for name, s in slices.items()]
    except SafetensorError as error:
        raise OSError(str(error)) from None


def file_header(entries: Sequence[Entry], *, metadata: Mapping[str, str]) -> bytes:
    """Returns the header: its length and JSON padded with spaces, so that the values start at a multiple of 8."""
    table: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt", **metadata}}
    spans = pairwise(accumulate((entry.num_bytes for entry in entries), initial=0))
    for entry, span in zip(entries, spans, strict=True):
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
