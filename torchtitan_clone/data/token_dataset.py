"""Batches from a token store: any row of any global batch is found directly, without reading what comes before."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.permutation import permuted
from torchtitan_clone.data.row_reader import BatchSlice, Note, RowReader
from torchtitan_clone.data.token_store import Split, TokenStore, damaged_store


class _Rows:
    """A split as rows: windows of seq_len + 1 tokens, each starting at the last token of the one before."""

    def __init__(self, store: TokenStore, *, split: Split, seq_len: int) -> None:
        self._store = store
        self._tokens = store.tokens(split)
        self._seq_len = seq_len
        self.count = num_rows(store, split=split, seq_len=seq_len)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Rows [b, seq_len + 1]; ConfigError if the file holds what cannot have been written."""
        length = self._seq_len
        rows = np.stack([self._tokens[start : start + length + 1] for start in (indices * length).tolist()])
        if (highest := rows.max()) >= self._store.meta.vocab_size:
            raise damaged_store(
                self._store.folder,
                reason=f"it holds token id {highest}, and the tokenizer has {self._store.meta.vocab_size} ids",
            )
        return rows


def num_rows(store: TokenStore, *, split: Split, seq_len: int) -> int:
    """Whole rows in a split."""
    return max(0, store.meta.tokens[split] - 1) // seq_len


class _TrainFeed(RowReader):
    """Shuffled epochs without end, from a sample on."""

    def __init__(self, store: TokenStore, *, share: BatchSlice, seed: int, samples: int) -> None:
        super().__init__(share)
        self._store, self._seed, self._samples = store, seed, samples

    def read(self, rows: range) -> Iterator[tuple[np.ndarray, Note]]:
        source = _Rows(self._store, split="train", seq_len=self.share.seq_len)
        for first in count(self._samples, self.share.global_batch_size):
            samples = np.arange(first + rows.start, first + rows.stop)
            yield source.take(rows_of_samples(samples, num_rows=source.count, seed=self._seed)), None


def rows_of_samples(samples: np.ndarray, *, num_rows: int, seed: int) -> np.ndarray:
    """Which row each sample is: every epoch of num_rows samples is one order of all rows."""
    epochs, positions = np.divmod(samples, num_rows)
    rows = np.empty_like(samples)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        rows[chosen] = permuted(positions[chosen], n=num_rows, seed=seed, epoch=epoch)
    return rows


@dataclass(frozen=True, kw_only=True)
class _ValidationFeed:
    """The held-out rows once, in their order."""

    store: TokenStore
    share: BatchSlice

    def __len__(self) -> int:
        rows = num_rows(self.store, split="validation", seq_len=self.share.seq_len)
        return math.ceil(rows / self.share.global_batch_size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the rank's rows of each global batch, and how many at their end only fill it up."""
        source = _Rows(self.store, split="validation", seq_len=self.share.seq_len)
        for first in range(0, source.count, self.share.global_batch_size):
            indices = np.arange(first + self.share.rows.start, first + self.share.rows.stop)
            padding = int(np.count_nonzero(indices >= source.count))
            yield source.take(np.minimum(indices, source.count - 1)), padding


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Local files, by way of their token store."""

    store: TokenStore

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the rows, in a checkpoint's words."""
        meta = self.store.meta
        return {
            "data": meta.source_fingerprint,
            "tokenizer": meta.tokenizer_fingerprint,
            "eos_id": meta.eos_id,
            "held_out_fraction": meta.held_out_fraction,
        }

    def train_reader(self, share: BatchSlice, *, seed: int, samples: int, position: Mapping[str, Any]) -> RowReader:
        """Rows from a sample on; ConfigError if there is not even one."""
        self._check_length("train", share=share, remedy="give it more text")
        return _TrainFeed(self.store, share=share, seed=seed, samples=samples)

    def validation_reader(self, share: BatchSlice) -> _ValidationFeed:
        """Held-out rows; ConfigError if there is not even one."""
        self._check_length(
            "validation", share=share, remedy="raise data.held_out_fraction, set validation.enable=false"
        )
        return _ValidationFeed(store=self.store, share=share)

    def _check_length(self, split: Split, *, share: BatchSlice, remedy: str) -> None:
        if not num_rows(self.store, split=split, seq_len=share.seq_len):
            meta = self.store.meta
            raise ConfigError(
                f"the {split} split of {meta.source} has {meta.tokens[split]:,} tokens in {meta.documents[split]:,} "
                f"documents, and one row takes training.seq_len + 1 = {share.seq_len + 1:,}; "
                f"{remedy}, or lower training.seq_len"
            )
