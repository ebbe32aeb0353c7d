"""Datasets: any row of any global batch by its index, without reading those before it.

    global batch s     | row 0 | row 1 | ...                                   | row G - 1 |
    replica groups     |      group 0      |      group 1      |         ...               |    slice_of_rank()
    ranks of a group   | rank 0  | rank 1  |                                                    a BatchSlice
    workers of a rank  | 0  | 1  |                                                              RowReader

Row r is sample s * G + r; sample i is row i mod n of a permutation of all n rows, another one in each epoch i // n.
Shapes: B rows, T tokens of a row (seq_len).
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import ClassVar, Protocol, cast

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.marks import ids_of
from torchtitan_clone.data.slices import Tokens, load_slices
from torchtitan_clone.data.token_store import Split, TokenStore, corrupt_store_error

PERMUTATION_ROUNDS = 8
Cursor = tuple[int, int, int]
"""Position in a stream: epoch, document within the epoch, token within the document."""
Bookmark = tuple[int, int, str | None]
"""Place to resume reading: epoch, document, and the library's own state there as JSON (None: start of the epoch)."""
StreamPosition = tuple[list[tuple[int, Cursor]], Bookmark]
"""Cursors of some streams, by index of the row, and a bookmark at or before all of them; also with lists for tuples."""
RowChunk = tuple[np.ndarray, list[StreamPosition]]
"""Rows [B, T + 1] with the marks of chats, and the position after them in each hub dataset; other positions follow from
the number of samples.

Stream r of the j-th hub dataset of a mixture has the index j * G + r, for G rows of the global batch.
"""
HeldOutRows = Callable[[], Iterator[tuple[np.ndarray, int, int]]]
"""Yields held-out rows [B, T + 1] of each global batch once, how many of them, at the end, are padding, and the
index of their source."""
ReadRows = Callable[[range], Iterator[RowChunk]]
"""Yields the given rows of one global batch after another."""
BATCHES_AHEAD = 16
"""Batches that are read before they are needed where rows come from an object store."""


@dataclass(frozen=True, kw_only=True)
class StreamState:
    """Position of all streams of the global batch, one per row."""

    cursors: list[Cursor]
    bookmark: Bookmark
    """At or before all cursors."""


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

    def __init__(self, batch_slice: BatchSlice, *, read: ReadRows) -> None:
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


def read_in_thread(read: ReadRows, rows: range) -> Iterator[RowChunk]:
    """Yields what `read` yields, which a thread reads up to BATCHES_AHEAD batches before; raises its errors in turn.

    The thread fetches blocks of an object store; neither the end of the iterator nor of the process waits for it.
    """
    found: SimpleQueue[RowChunk | Exception | None] = SimpleQueue()
    room = Semaphore(BATCHES_AHEAD)
    is_closed = Event()

    def fill() -> None:
        try:
            for chunk in read(rows):
                found.put(chunk)
                room.acquire()
                if is_closed.is_set():
                    return
            found.put(None)
        except Exception as error:  # noqa: BLE001, raised where the batch would be
            found.put(error)

    Thread(target=fill, daemon=True, name="reads ahead").start()
    try:
        for number in count(1):
            chunk = found.get()
            if isinstance(chunk, Exception):
                raise chunk
            if chunk is None:
                return
            if number % (BATCHES_AHEAD // 2) == 0:  # the thread wakes up rarely
                room.release(BATCHES_AHEAD // 2)
            yield chunk
    finally:
        is_closed.set()
        room.release()


class Dataset(Protocol):
    """Tokenized text that can be read from any position."""

    is_mixture: ClassVar[bool]

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


class StoredRows(Protocol):
    """Rows of one split. Shapes: B rows, T tokens of a row (seq_len)."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Returns rows [B, T + 1] by their indices."""
        ...

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Returns where in the split the inputs [B, T] of rows are; -1 for padding."""
        ...


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Consecutive windows of the tokens, each of which begins with the last token of the one before."""

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def read(self, indices: np.ndarray) -> np.ndarray:
        bounds = [(start, start + self.seq_len + 1) for start in (indices * self.seq_len).tolist()]
        load_slices(self.tokens, bounds)
        return np.stack([self.tokens[start:stop] for start, stop in bounds])

    def positions(self, indices: np.ndarray) -> np.ndarray:
        return indices[:, None] * self.seq_len + np.arange(self.seq_len)


def open_rows(store: TokenStore, split: Split, *, seq_len: int) -> StoredRows:
    """Returns the rows of a split, and packs the store first if its packing is "best_fit" and that was not done.

    ConfigError if packed rows are damaged, or cannot be written.
    """
    if store.packing == "concatenate":
        return Windows(tokens=store.tokens(split), seq_len=seq_len)
    from torchtitan_clone.data.best_fit import open_packed

    return open_packed(store, split, seq_len=seq_len)


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Local files, tokenized into a token store.

    A mixture reads its sources by `num_rows` and `rows`: random access to rows of any length.
    """

    is_mixture: ClassVar[bool] = False
    store: TokenStore

    @property
    def identity(self) -> DatasetIdentity:
        meta = self.store.meta
        return DatasetIdentity(
            data=self.store.fingerprint,
            tokenizer=meta.tokenizer_fingerprint,
            eos_id=meta.eos_id,
            held_out_fraction=meta.held_out_fraction,
        )

    def train_reader(
        self, batch_slice: BatchSlice, *, seed: int, samples: int, streams: list[StreamState]
    ) -> RowReader:
        self.num_rows("train", seq_len=batch_slice.seq_len)
        read = partial(self._read_train, batch_slice=batch_slice, seed=seed, samples=samples)
        return RowReader(batch_slice, read=read if self.store.remote is None else partial(read_in_thread, read))

    def validation_reader(self, batch_slice: BatchSlice) -> HeldOutRows:
        num_rows = self.num_rows("validation", seq_len=batch_slice.seq_len)
        return partial(self._read_validation, batch_slice, num_rows=num_rows)

    def num_rows(self, split: Split, *, seq_len: int) -> int:
        """Returns the number of rows of a split; ConfigError if there is none."""
        meta = self.store.meta
        if num_rows := len(open_rows(self.store, split, seq_len=seq_len)):
            return num_rows
        remedies = {"train": "add text", "validation": "raise data.held_out_fraction, set validation.enable to false"}
        shorter = ", or lower training.seq_len" if meta.documents[split] else ", or add other documents"
        if meta.marks and self.store.packing != "concatenate":
            shorter = ", or raise training.seq_len: longer chats are left out"
        raise ConfigError(
            f"training.seq_len = {seq_len}: a sequence takes training.seq_len + 1 = {seq_len + 1:,} tokens, and the "
            f"{split} split of {meta.source} has {meta.tokens[split]:,} in {meta.documents[split]:,} documents; "
            f"{remedies[split]}{shorter}."
        )

    def train_rows(self, *, seq_len: int, seed: int) -> Callable[[np.ndarray], np.ndarray]:
        """Opens the rows for training; returns a function that reads rows [B, T + 1] by the number of their use.

        Every epoch of all rows is shuffled. ConfigError if there is no row.
        """
        num_rows = self.num_rows("train", seq_len=seq_len)
        stored = open_rows(self.store, "train", seq_len=seq_len)

        def read(uses: np.ndarray) -> np.ndarray:
            return self._rows(stored, indices=rows_of_samples(uses, num_rows=num_rows, seed=seed))

        return read

    def train_positions(self, uses: np.ndarray, *, seq_len: int, seed: int) -> np.ndarray:
        """Returns where in the split the inputs [B, T] of the rows are that train_rows() reads; -1 for padding."""
        stored = open_rows(self.store, "train", seq_len=seq_len)
        return stored.positions(rows_of_samples(uses, num_rows=len(stored), seed=seed))

    def _read_train(self, rows: range, *, batch_slice: BatchSlice, seed: int, samples: int) -> Iterator[RowChunk]:
        read = self.train_rows(seq_len=batch_slice.seq_len, seed=seed)
        for first in count(samples, batch_slice.global_batch_size):
            yield read(np.arange(first + rows.start, first + rows.stop)), []

    def _read_validation(self, batch_slice: BatchSlice, *, num_rows: int) -> Iterator[tuple[np.ndarray, int, int]]:
        stored = open_rows(self.store, "validation", seq_len=batch_slice.seq_len)
        for first in range(0, num_rows, batch_slice.global_batch_size):
            indices = first + np.array(batch_slice.rows)
            rows = self._rows(stored, indices=np.minimum(indices, num_rows - 1))
            yield rows, int(np.count_nonzero(indices >= num_rows)), 0

    def _rows(self, stored: StoredRows, *, indices: np.ndarray) -> np.ndarray:
        rows = stored.read(indices)
        vocab_size = self.store.meta.vocab_size
        if (highest := (ids_of(rows) if self.store.meta.marks else rows).max()) >= vocab_size:
            reason = f"it holds token id {highest}, and the tokenizer has {vocab_size} ids"
            raise corrupt_store_error(self.store.folder, reason=reason)
        return rows


def rows_of_samples(samples: np.ndarray, *, num_rows: int, seed: int) -> np.ndarray:
    """Returns the row index of each sample; every epoch of num_rows samples is one permutation of the rows."""
    epochs, positions = np.divmod(samples, num_rows)
    rows = np.empty_like(samples)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        rows[chosen] = permute(positions[chosen], n=num_rows, seed=seed, epoch=epoch)
    return rows


def permute(positions: np.ndarray, *, n: int, seed: int, epoch: int | str) -> np.ndarray:
    """Maps positions in [0, n) one-to-one onto [0, n); seed and epoch select the permutation.

    A Feistel network over pairs (left, right) with left < a and right < b, where a * b is slightly larger than n; a
    result of n or more is mapped again. Source: J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, 2002.
    """
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * PERMUTATION_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    b = np.uint64(max(1, int(np.ceil(np.sqrt(n)))))
    a = np.uint64(-(-n // int(b)))
    result = _network(positions.astype(np.uint64), a=a, b=b, keys=keys)
    while (outside := np.flatnonzero(result >= n)).size:
        result[outside] = _network(result[outside], a=a, b=b, keys=keys)
    return result.astype(np.int64)


def _network(values: np.ndarray, *, a: np.uint64, b: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(values, b)
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(right ^ key_left) % a) % a
        right = (right + _mix(left ^ key_right) % b) % b
    return left * b + right


def _mix(values: np.ndarray) -> np.ndarray:
    """Hashes each value to 64 bits (multiplication wraps). Source: the finalizer of SplitMix64, OOPSLA 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
