"""The interface that token stores and hub datasets share: readers of one rank's rows of every global batch.

Shapes: B rows, T tokens of a row (seq_len).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value

Cursor = tuple[int, int, int]
"""Position in a stream: epoch, document within the epoch, token within the document."""
Bookmark = tuple[int, int, str | None]
"""Place to resume reading: epoch, document, and the library's own state there as JSON (None: start of the epoch)."""
StreamPosition = tuple[list[tuple[int, Cursor]], Bookmark]
"""Cursors of some streams, by index of the row, and a bookmark at or before all of them; also with lists for tuples."""
RowChunk = tuple[np.ndarray, list[StreamPosition]]
"""Rows [B, T + 1] and the position after them in each hub dataset; other positions follow from the number of samples.

Stream r of the j-th hub dataset of a mixture has the index j * G + r, for G rows of the global batch.
"""
HeldOutRows = Callable[[], Iterator[tuple[np.ndarray, int, int]]]
"""Yields held-out rows [B, T + 1] of each global batch once, how many of them, at the end, are padding, and the
index of their source."""

START: Bookmark = (0, 0, None)
_MAX_STATE = 1 << 24  # characters of a bookmark's state


def positions_from_json(value: Value) -> list[StreamPosition]:
    """Returns stream positions that another rank sent as JSON. DocumentError if they are not valid."""
    return [_position_from_json(each) for each in value.items()]


def _position_from_json(value: Value) -> StreamPosition:
    cursors, bookmark = value.items(count=2)
    return [_cursor_from_json(each) for each in cursors.items()], _bookmark_from_json(bookmark)


def _cursor_from_json(value: Value) -> tuple[int, Cursor]:
    row, cursor = value.items(count=2)
    epoch, document, token = cursor.integers(count=3)
    return row.integer(), (epoch, document, token)


def _bookmark_from_json(value: Value) -> Bookmark:
    epoch, document, state = value.items(count=3)
    return epoch.integer(), document.integer(), None if state.value is None else state.text(max_chars=_MAX_STATE)


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Position of all streams of the global batch, one per row."""

    cursors: list[Cursor]
    bookmark: Bookmark
    """At or before all cursors."""

    def to_plain(self) -> dict[str, object]:
        """Returns the position as plain data."""
        return {"cursors": [list(cursor) for cursor in self.cursors], "bookmark": list(self.bookmark)}

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> "StreamState | None":
        """Returns the position that `to_plain` wrote, None if there is none; DocumentError if it is damaged."""
        if "cursors" not in state:
            return None
        rows = [item.integers(count=3) for item in Value(state["cursors"], where="cursors").items()]
        if not rows:
            raise DocumentError("cursors: must not be empty")
        bookmark = _bookmark_from_json(Value(state.get("bookmark", [*START]), where="bookmark"))
        return cls(cursors=[(epoch, document, token) for epoch, document, token in rows], bookmark=bookmark)


def streams_to_plain(streams: list[StreamState]) -> dict[str, object]:
    """Returns the positions in all hub datasets as plain data; that in a single one without a list."""
    if len(streams) == 1:
        return streams[0].to_plain()
    return {"streams": [stream.to_plain() for stream in streams]} if streams else {}


def streams_from_plain(state: Mapping[str, Any]) -> list[StreamState]:
    """Returns the positions that `streams_to_plain` wrote; DocumentError if they are damaged."""
    entries = [item.plain_entries() for item in Value(state.get("streams", [state]), where="streams").items()]
    return [stream for entry in entries if (stream := StreamState.from_plain(entry)) is not None]


@dataclass(frozen=True, kw_only=True)
class DatasetIdentity:
    """What determines the tokens of a dataset; saved in checkpoints and compared on resume."""

    data: str
    """Fingerprint of the text."""
    tokenizer: str
    eos_id: int
    held_out_fraction: float


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """The rows of every global batch that one rank reads."""

    global_batch_size: int
    rows: range
    """Rows that are read: contiguous, within range(global_batch_size), at least one."""
    size: int
    """Rows of the rank's batch, the same on every rank; rows beyond those read are padding."""
    counted: int
    """Rows at the front that are trained on; 0 where the rank has none and the row it reads is padding too."""
    seq_len: int


def slice_of_rank(
    rank: int,
    *,
    num_ranks: int,
    global_batch_size: int,
    seq_len: int,
    replica_index: int = 0,
    num_replicas: int = 1,
    multiple_of: int = 1,
) -> BatchSlice:
    """Returns the contiguous rows of a rank, out of the rows of its replica group, out of the global batch.

    The slices differ by one row where the numbers do not divide; `size` is the largest, rounded up to `multiple_of`.
    """
    start, stop = _bounds(global_batch_size, index=replica_index, count=num_replicas)
    first, last = _bounds(stop - start, index=rank, count=num_ranks)
    largest = math.ceil(math.ceil(global_batch_size / num_replicas) / num_ranks)
    return BatchSlice(
        global_batch_size=global_batch_size,
        rows=range(start + first, start + last) if first < last else range(1),
        size=math.ceil(largest / multiple_of) * multiple_of,
        counted=last - first,
        seq_len=seq_len,
    )


def _bounds(length: int, *, index: int, count: int) -> tuple[int, int]:
    return index * length // count, (index + 1) * length // count


class RowReader(IterableDataset[RowChunk]):
    """Yields the rows of one batch slice for one global batch after another, without end.

    A worker process yields its own rows of the slice. `read` yields the given rows of each global batch; it is pickled.
    """

    def __init__(self, batch_slice: BatchSlice, *, read: Callable[[range], Iterator[RowChunk]]) -> None:
        self.batch_slice = batch_slice
        self._read = read

    def __iter__(self) -> Iterator[RowChunk]:
        rows = self.batch_slice.rows
        if worker := get_worker_info():
            first, last = _bounds(len(rows), index=worker.id, count=worker.num_workers)
            rows = rows[first:last]
            return self._read_in_worker(rows)
        return self._read(rows)

    def _read_in_worker(self, rows: range) -> Iterator[RowChunk]:
        try:
            yield from self._read(rows)
        except ConfigError as error:  # torch would raise another, whose message is a traceback
            yield cast("RowChunk", error)


class Dataset(Protocol):
    """Tokenized text that can be read from any position."""

    @property
    def identity(self) -> DatasetIdentity: ...

    def train_reader(
        self, batch_slice: BatchSlice, *, seed: int, samples: int, streams: list[StreamState]
    ) -> RowReader:
        """Returns a reader of the batches after `samples` and `streams`; ConfigError if there is no row.

        `streams` has one position for each hub dataset, or is empty: their start.
        """
        ...

    def validation_reader(self, batch_slice: BatchSlice) -> HeldOutRows:
        """Returns a reader of the held-out rows; ConfigError if there is none."""
        ...
