"""Reads rows from a token store: any row of any global batch by its index, without reading those before it.

Shapes: B rows, T tokens of a row (seq_len).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.best_fit import Rows, open_rows
from torchtitan_clone.data.permutation import permute
from torchtitan_clone.data.row_reader import BatchSlice, DatasetIdentity, HeldOutRows, RowChunk, RowReader, StreamState
from torchtitan_clone.data.token_store import Split, TokenStore, corrupt_store_error


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Local files, tokenized into a token store.

    A mixture reads its sources by `num_rows` and `rows`: random access to rows of any length.
    """

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
        return RowReader(batch_slice, read=read)

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

    def _rows(self, stored: Rows, *, indices: np.ndarray) -> np.ndarray:
        rows = stored.read(indices)
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
