"""Reads rows from a token store: any row of any global batch by its index, without reading those before it.

Shapes: B rows, T tokens of a row (seq_len).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.permutation import permute
from torchtitan_clone.data.row_reader import (
    BatchSlice,
    DatasetIdentity,
    RowChunk,
    RowReader,
    StreamState,
    ValidationReader,
)
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
        """Returns a reader of shuffled epochs of the train split; ConfigError if it has no row."""
        num_rows = self._num_rows("train", seq_len=batch_slice.seq_len, remedy="add text")
        read = partial(self._read_train, batch_slice=batch_slice, num_rows=num_rows, seed=seed, samples=samples)
        return RowReader(batch_slice.rows, read=read)

    def validation_reader(self, batch_slice: BatchSlice) -> ValidationReader:
        """Returns a reader of the validation split in order; ConfigError if it has no row."""
        remedy = "raise data.held_out_fraction, set validation.enable to false"
        num_rows = self._num_rows("validation", seq_len=batch_slice.seq_len, remedy=remedy)
        return ValidationReader(
            num_batches=math.ceil(num_rows / batch_slice.global_batch_size),
            read=partial(self._read_validation, batch_slice, num_rows=num_rows),
        )

    def _num_rows(self, split: Split, *, seq_len: int, remedy: str) -> int:
        meta = self.store.meta
        if num_rows := max(0, meta.tokens[split] - 1) // seq_len:
            return num_rows
        raise ConfigError(
            f"training.seq_len = {seq_len}: a sequence takes training.seq_len + 1 = {seq_len + 1:,} tokens, and the "
            f"{split} split of {meta.source} has {meta.tokens[split]:,} in {meta.documents[split]:,} documents; "
            f"{remedy}, or lower training.seq_len."
        )

    def _read_train(
        self, rows: range, *, batch_slice: BatchSlice, num_rows: int, seed: int, samples: int
    ) -> Iterator[RowChunk]:
        tokens = self.store.tokens("train")
        for first in count(samples, batch_slice.global_batch_size):
            indices = rows_of_samples(np.arange(first + rows.start, first + rows.stop), num_rows=num_rows, seed=seed)
            yield self._rows(tokens, indices=indices, seq_len=batch_slice.seq_len), None

    def _read_validation(self, batch_slice: BatchSlice, *, num_rows: int) -> Iterator[tuple[np.ndarray, int]]:
        tokens = self.store.tokens("validation")
        for first in range(0, num_rows, batch_slice.global_batch_size):
            indices = first + np.array(batch_slice.rows)
            rows = self._rows(tokens, indices=np.minimum(indices, num_rows - 1), seq_len=batch_slice.seq_len)
            yield rows, int(np.count_nonzero(indices >= num_rows))

    def _rows(self, tokens: np.ndarray, *, indices: np.ndarray, seq_len: int) -> np.ndarray:
        """Returns windows of tokens [B, T + 1], each starting at the last token of the previous one.

        ConfigError if there is an id that the tokenizer does not have.
        """
        rows = np.stack([tokens[start : start + seq_len + 1] for start in (indices * seq_len).tolist()])
        vocab_size = self.store.meta.vocab_size
        if (highest := rows.max()) >= vocab_size:
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
