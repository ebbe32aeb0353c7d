"""Token ids that are read in slices, wherever they are."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from torchtitan_clone.documents import DocumentError, open_regular

_OPEN_FILES = 128


class Tokens(Protocol):
    """An array of NumPy, or one that is put together from several or read from an object store."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> np.ndarray: ...


def load_slices(tokens: Tokens, bounds: Sequence[tuple[int, int]]) -> None:
    """Fetches the slices [start, stop) of tokens in an object store at once, which are then read one by one."""
    if (load := getattr(tokens, "load", None)) is not None:
        load(bounds)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive token ids of a file."""

    file: int
    """Index into the files of the source."""
    start: int
    """Offset in bytes."""
    dtype: str
    tokens: int

    def part(self, first: int, last: int) -> "Segment":
        """Returns the ids in [first, last)."""
        start = self.start + first * np.dtype(self.dtype).itemsize
        return Segment(file=self.file, start=start, dtype=self.dtype, tokens=last - first)


class TokenArray:
    """Token ids of several files as one array that is read in slices; opens the files as they are needed."""

    def __init__(self, segments: Sequence[Segment], *, files: Sequence[Path], added: np.ndarray, eos_id: int) -> None:
        self._segments = segments
        self._starts = np.cumsum([0, *(segment.tokens for segment in segments)])
        self._added = added
        self._eos_id = eos_id
        self._open = lru_cache(_OPEN_FILES)(lambda file: map_bytes(files[file]))
        self.dtype = np.result_type(np.uint16, np.min_scalar_type(eos_id), *{segment.dtype for segment in segments})

    def __len__(self) -> int:
        return int(self._starts[-1]) + len(self._added)

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, _ = positions.indices(len(self))
        first, last = (int(each) for each in np.searchsorted(self._added, [start, stop]))
        stored = self._stored(start - first, stop - last)
        if first == last:
            return stored
        ids = np.full(stop - start, self._eos_id, dtype=self.dtype)
        is_stored = np.ones(len(ids), dtype=bool)
        is_stored[self._added[first:last] - start] = False
        ids[is_stored] = stored
        return ids

    def _stored(self, start: int, stop: int) -> np.ndarray:
        """Returns ids by their place among those that are in the files."""
        ids = np.empty(stop - start, dtype=self.dtype)
        position = start
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while position < stop:
            segment, offset = self._segments[index], position - int(self._starts[index])
            part = segment.part(offset, min(segment.tokens, offset + stop - position))
            content = self._open(part.file)[part.start :][: part.tokens * np.dtype(part.dtype).itemsize]
            ids[position - start :][: part.tokens] = content.view(part.dtype)
            position += part.tokens
            index += 1
        return ids


def map_bytes(path: Path, *, follow_links: bool = True) -> np.ndarray:
    """Maps a file into memory as an array of bytes."""
    with open_regular(path, follow_links=follow_links) as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))


def map_numbers(path: Path, *, dtype: str) -> np.ndarray:
    """Maps a file of numbers, which no link leads to, into memory; DocumentError if it has no whole number of them."""
    content = map_bytes(path, follow_links=False)
    if rest := len(content) % np.dtype(dtype).itemsize:
        raise DocumentError(f"{path.name} has {rest} bytes after its last {dtype}")
    return content.view(dtype)
