"""Reads rows from a token store: any row of any global batch by its index, without reading those before it.

Shapes: B rows, T tokens of a row (seq_len).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.permutation import permute
from torchtitan_clone.data.row_reader import BatchSlice, DatasetIdentity, RowChunk, RowReader, StreamState
from torchtitan_clone.data.token_store import Split, TokenStore, corrupt_store_error


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Local files, tokenized into a token store."""

    store: TokenStore

    @property
    def identity(self) -> DatasetIdentity:
        """What determines the tokens."""
        meta = self.store.meta
        return DatasetIdentity(
            data=meta.source_fingerprint,
            tokenizer=meta.tokenizer_fingerprint,
            eos_id=meta.eos_id,
            held_out_fraction=meta.held_out_fraction,
        )

    def train_reader(
        self, batch_slice: BatchSlice, *, seed: int, samples: int, streams: StreamState | None
    ) -> RowReader:
        """Returns a reader of the batches after `samples` samples; ConfigError if the split has no row."""
        self._check_length("train", seq_len=batch_slice.seq_len, remedy="add text")
        return _ShuffledReader(self.store, batch_slice=batch_slice, seed=seed, samples=samples)

    def validation_reader(self, batch_slice: BatchSlice) -> "_HeldOutReader":
        """Returns a reader of the held-out rows; ConfigError if there is none."""
        remedy = "raise data.held_out_fraction, set validation.enable to false"
        self._check_length("validation", seq_len=batch_slice.seq_len, remedy=remedy)
        return _HeldOutReader(store=self.store, batch_slice=batch_slice)

    def _check_length(self, split: Split, *, seq_len: int, remedy: str) -> None:
        if not num_rows(self.store, split=split, seq_len=seq_len):
            meta = self.store.meta
            raise ConfigError(
                f"training.seq_len = {seq_len}: a sequence takes training.seq_len + 1 = {seq_len + 1:,} tokens, and "
                f"the {split} split of {meta.source} has {meta.tokens[split]:,} in {meta.documents[split]:,} "
                f"documents; {remedy}, or lower training.seq_len."
            )


class _Rows:
    """A split as rows: windows of seq_len + 1 tokens, each starting at the last token of the previous one."""

    def __init__(self, store: TokenStore, *, split: Split, seq_len: int) -> None:
        self._store = store
        self._tokens = store.tokens(split)
        self._seq_len = seq_len
        self.count = num_rows(store, split=split, seq_len=seq_len)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Returns rows [B, T + 1]; ConfigError if the file holds an id that the tokenizer does not have."""
        length = self._seq_len
        rows = np.stack([self._tokens[start : start + length + 1] for start in (indices * length).tolist()])
        if (highest := rows.max()) >= self._store.meta.vocab_size:
            raise corrupt_store_error(
                self._store.folder,
                reason=f"it holds token id {highest}, and the tokenizer has {self._store.meta.vocab_size} ids",
            )
        return rows


def num_rows(store: TokenStore, *, split: Split, seq_len: int) -> int:
    """Returns the number of complete rows in a split."""
    return max(0, store.meta.tokens[split] - 1) // seq_len


def rows_of_samples(samples: np.ndarray, *, num_rows: int, seed: int) -> np.ndarray:
    """Returns the row index of each sample; every epoch of num_rows samples is one permutation of the rows."""
    epochs, positions = np.divmod(samples, num_rows)
    rows = np.empty_like(samples)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        rows[chosen] = permute(positions[chosen], n=num_rows, seed=seed, epoch=epoch)
    return rows


class _ShuffledReader(RowReader):
    """Yields shuffled epochs of the train split without end, starting at a sample."""

    def __init__(self, store: TokenStore, *, batch_slice: BatchSlice, seed: int, samples: int) -> None:
        super().__init__(batch_slice)
        self._store = store
        self._seed = seed
        self._samples = samples

    def read(self, rows: range) -> Iterator[RowChunk]:
        source = _Rows(self._store, split="train", seq_len=self.batch_slice.seq_len)
        for first in count(self._samples, self.batch_slice.global_batch_size):
            samples = np.arange(first + rows.start, first + rows.stop)
            yield source.read(rows_of_samples(samples, num_rows=source.count, seed=self._seed)), None


@dataclass(frozen=True, kw_only=True)
class _HeldOutReader:
    """Yields the validation split once, in order."""

    store: TokenStore
    batch_slice: BatchSlice

    @property
    def num_batches(self) -> int:
        """Number of global batches, the last one padded."""
        rows = num_rows(self.store, split="validation", seq_len=self.batch_slice.seq_len)
        return math.ceil(rows / self.batch_slice.global_batch_size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        source = _Rows(self.store, split="validation", seq_len=self.batch_slice.seq_len)
        for first in range(0, source.count, self.batch_slice.global_batch_size):
            indices = np.arange(first + self.batch_slice.rows.start, first + self.batch_slice.rows.stop)
            padding = int(np.count_nonzero(indices >= source.count))
            yield source.read(np.minimum(indices, source.count - 1)), padding
