"""Reads rows from a token store: any row of any global batch by its index, without reading those before it.

Shapes: B rows, T tokens of a row (seq_len).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.best_fit import Rows, open_rows
from torchtitan_clone.data.row_reader import BatchSlice, DatasetIdentity, HeldOutRows, RowChunk, RowReader, StreamState
from torchtitan_clone.data.token_store import Split, TokenStore, corrupt_store_error

PERMUTATION_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Local files, tokenized into a token store."""

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
        self, batch_slice: BatchSlice, *, seed: int, samples: int, streams: StreamState | None
    ) -> RowReader:
        num_rows = self._num_rows("train", seq_len=batch_slice.seq_len, remedy="add text")
        read = partial(self._read_train, batch_slice=batch_slice, num_rows=num_rows, seed=seed, samples=samples)
        return RowReader(batch_slice, read=read)

    def validation_reader(self, batch_slice: BatchSlice) -> HeldOutRows:
        remedy = "raise data.held_out_fraction, set validation.enable to false"
        num_rows = self._num_rows("validation", seq_len=batch_slice.seq_len, remedy=remedy)
        return partial(self._read_validation, batch_slice, num_rows=num_rows)

    def _num_rows(self, split: Split, *, seq_len: int, remedy: str) -> int:
        meta = self.store.meta
        if num_rows := len(open_rows(self.store, split, seq_len=seq_len)):
            return num_rows
        raise ConfigError(
            f"training.seq_len = {seq_len}: a sequence takes training.seq_len + 1 = {seq_len + 1:,} tokens, and the "
            f"{split} split of {meta.source} has {meta.tokens[split]:,} in {meta.documents[split]:,} documents; "
            f"{remedy}, or lower training.seq_len."
        )

    def _read_train(
        self, rows: range, *, batch_slice: BatchSlice, num_rows: int, seed: int, samples: int
    ) -> Iterator[RowChunk]:
        stored = open_rows(self.store, "train", seq_len=batch_slice.seq_len)
        for first in count(samples, batch_slice.global_batch_size):
            indices = rows_of_samples(np.arange(first + rows.start, first + rows.stop), num_rows=num_rows, seed=seed)
            yield self._rows(stored, indices=indices), None

    def _read_validation(self, batch_slice: BatchSlice, *, num_rows: int) -> Iterator[tuple[np.ndarray, int]]:
        stored = open_rows(self.store, "validation", seq_len=batch_slice.seq_len)
        for first in range(0, num_rows, batch_slice.global_batch_size):
            indices = first + np.array(batch_slice.rows)
            rows = self._rows(stored, indices=np.minimum(indices, num_rows - 1))
            yield rows, int(np.count_nonzero(indices >= num_rows))

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


def permute(positions: np.ndarray, *, n: int, seed: int, epoch: int) -> np.ndarray:
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
