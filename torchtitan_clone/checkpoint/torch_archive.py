"""Reads what torch.save wrote as plain data, and tensors in it one by one.

archive/data.pkl     a pickle of all but the values of tensors
archive/data/0       the values of a storage
"""

import struct
import zipfile
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.plain_pickle import Built, External, Name, parse_pickle
from torchtitan_clone.checkpoint.tensor_file import is_shape
from torchtitan_clone.documents import DocumentError, shorten

_STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"),
    *(("torch", name.removeprefix("torch.")) for name in _STORAGE_DTYPES),
}  # fmt: skip
"""All that the pickle may name, as pairs of module and name."""
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, KeyError, NotImplementedError, RuntimeError, ValueError, struct.error)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of an archive, without its values: a view of a storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    storage: str


class TorchArchive:
    """A value that torch.save wrote, with `Built` for each tensor; DocumentError if it holds more than plain data."""

    def __init__(self, file: Path | BytesIO, *, size: int, where: str) -> None:
        self._where = where
        self._size = size
        try:
            self._zip = zipfile.ZipFile(file)
            (described,) = (each for each in self._zip.namelist() if each.endswith("/data.pkl"))
        except _ZIP_ERRORS:
            raise self._damage("is no archive of torch.save") from None
        self._root = described.removesuffix("data.pkl")
        self.value = parse_pickle(self._member("data.pkl"), where=where, names=_NAMES)

    @staticmethod
    def as_tensor(value: object) -> StoredTensor | None:
        """Returns the tensor that a value in `value` stands for; None if it is something else."""
        match value:
            case Built(
                name="torch._utils._rebuild_tensor_v2",
                args=(
                    External(key=("storage", Name(text=storage), str(key), _, int())), int(first), tuple(size),
                    tuple(stride), bool(), dict(),
                ),
            ) if storage in _STORAGE_DTYPES and is_shape(size):  # fmt: skip
                steps = tuple(each for each in stride if type(each) is int and each >= 0)
                if len(steps) == len(stride) == len(size):
                    dtype = _STORAGE_DTYPES[storage]
                    return StoredTensor(dtype=dtype, shape=size, stride=steps, first=first, storage=key)
        return None

    def read(self, tensor: StoredTensor) -> Tensor:
        """Returns the tensor with its values; DocumentError if the archive has none or others."""
        dtype, content = tensor.dtype, self._member(f"data/{tensor.storage}")
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=dtype)
        if self._member("byteorder") != b"little" or not content or len(content) % dtype.itemsize:
            raise self._damage(f"is not made of values of {str(dtype)[6:]} with the lowest byte first")
        values = torch.frombuffer(bytearray(content), dtype=dtype)
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        if tensor.first < 0 or tensor.first + last >= values.numel():
            raise self._damage(f"has a tensor {list(tensor.shape)} outside of its values")
        return values.as_strided(tensor.shape, tensor.stride, tensor.first)

    def _member(self, name: str) -> bytes:
        try:
            info = self._zip.getinfo(self._root + name)
            if info.compress_type == zipfile.ZIP_STORED and info.file_size <= self._size:
                return self._zip.read(info)
        except _ZIP_ERRORS:
            pass
        raise self._damage(f"has no intact {shorten(name)}")

    def _damage(self, what: str) -> DocumentError:
        return DocumentError(f"{self._where} {what}; copy the checkpoint again")
