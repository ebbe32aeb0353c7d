"""Rows of a token store into which documents are packed without cutting them.

    <store>/best_fit-<seq_len>/{train,validation}.rows      first chunk of each row, and the end of the last (int64)
                               {train,validation}.starts    position of each chunk in the tokens (int64)
                               {train,validation}.lengths   length of each chunk (int64)

    row     |<---- document 7 ---->|<- document 3 ->|<- end of 9 ->| eos eos |      seq_len + 1 tokens
                  chunk                 chunk           chunk       padding

A *chunk* is a document, or a part of one that does not fit into a row: parts are full rows but the last. Chunks are
placed from the longest to the shortest, each into the row with the least room that suffices, and never divided. What is
left of a row is filled with end-of-text tokens, which have no target.
Source: H. Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import get_args

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.marks import END, ID_BITS, TARGET
from torchtitan_clone.data.slices import Tokens, load_slices, map_numbers
from torchtitan_clone.data.token_store import Split, TokenStore, build_once, corrupt_store_error
from torchtitan_clone.documents import DocumentError
from torchtitan_clone.files import write_atomically

logger = logging.getLogger("torchtitan_clone")

CUT_PACKING = "best_fit_cut"
"""Packing of a store of chats that are cut where they are too long."""
CHUNK_FILES = ("rows", "starts", "lengths")
_CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of whole chunks, each filled up with end-of-text tokens."""

    tokens: Tokens
    seq_len: int
    eos_id: int
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.rows) - 1

    def read(self, indices: np.ndarray) -> np.ndarray:
        out = np.full((len(indices), self.seq_len + 1), self.eos_id, dtype=self.tokens.dtype)
        chunks = [list(self._chunks(index)) for index in indices.tolist()]
        load_slices(self.tokens, [(start, start + length) for of_row in chunks for _, start, length in of_row])
        for row, of_row in zip(out, chunks, strict=True):
            for place, start, length in of_row:
                row[place : place + length] = self.tokens[start : start + length]
                if row[place + length - 1] >> ID_BITS:
                    row[place + length - 1] |= END << ID_BITS  # that of a chat which is cut
        return out

    def positions(self, indices: np.ndarray) -> np.ndarray:
        out = np.full((len(indices), self.seq_len + 1), -1)
        for row, index in zip(out, indices.tolist(), strict=True):
            for place, start, length in self._chunks(index):
                row[place : place + length] = np.arange(start, start + length)
        return out[:, :-1]

    def _chunks(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yields for each chunk of a row its place there, and where in the tokens it starts, and its length."""
        chunks, place = slice(self.rows[index], self.rows[index + 1]), 0
        for start, length in zip(self.starts[chunks].tolist(), self.lengths[chunks].tolist(), strict=True):
            yield place, start, length
            place += length


def packing_name(packing: str, *, long_chats: str | None) -> str:
    """Returns the packing of a store under data.packing; `long_chats` is the option of a source of chats."""
    return CUT_PACKING if packing == "best_fit" and long_chats == "cut" else packing


def open_packed(store: TokenStore, split: Split, *, seq_len: int) -> PackedRows:
    """Returns the packed rows of a split, and packs the store first if that was not done.

    ConfigError if they are damaged, or cannot be written.
    """
    folder = store.folder / f"{store.packing}-{seq_len}"
    try:
        build_once(folder, name=store.meta.source, build=partial(_write_rows, store=store, seq_len=seq_len))
        return _open_rows(store, split, seq_len=seq_len, folder=folder)
    except DocumentError as error:
        raise corrupt_store_error(folder, reason=str(error)) from error
    except OSError as error:
        remedy = 'set data.packing to "concatenate", or data.cache_folder to a folder that can be written'
        raise ConfigError(f'data.packing = "best_fit": rows in {folder} failed: {error}; {remedy}.') from error


def _open_rows(store: TokenStore, split: Split, *, seq_len: int, folder: Path) -> PackedRows:
    rows, starts, lengths = (map_numbers(folder / f"{split}.{name}", dtype="int64") for name in CHUNK_FILES)
    if not len(rows) or rows[0] != 0 or rows[-1] != len(starts) or len(starts) != len(lengths):
        raise DocumentError(f"{split}.rows does not reach from 0 to the number of chunks")
    tokens = store.tokens(split)
    changed = tuple((folder / f"{split}.{name}").stat().st_mtime_ns for name in CHUNK_FILES)
    _check_rows(folder, split, seq_len=seq_len, num_tokens=len(tokens), changed=changed)
    eos_id = store.meta.eos_id
    return PackedRows(tokens=tokens, seq_len=seq_len, eos_id=eos_id, rows=rows, starts=starts, lengths=lengths)


@cache  # rows are opened several times, and reading all chunks takes 5 s for 10^8
def _check_rows(folder: Path, split: Split, *, seq_len: int, num_tokens: int, changed: tuple[int, ...]) -> None:
    """DocumentError if a row has a chunk that is not in the tokens, or more than it has room for."""
    rows, starts, lengths = (map_numbers(folder / f"{split}.{name}", dtype="int64") for name in CHUNK_FILES)
    for first in range(0, len(rows) - 1, _CHECKED_AT_ONCE):
        bounds = rows[first : first + _CHECKED_AT_ONCE + 1]
        if (np.diff(bounds) <= 0).any() or bounds[0] < 0 or bounds[-1] > len(starts):
            raise DocumentError(f"{split}.rows does not increase")
        begins, sizes = starts[bounds[0] : bounds[-1]], lengths[bounds[0] : bounds[-1]]
        if (sizes <= 0).any() or (begins < 0).any() or (begins > num_tokens - sizes).any():
            raise DocumentError(f"{split}.starts and {split}.lengths exceed the {num_tokens:,} tokens of the store")
        if np.add.reduceat(sizes, bounds[:-1] - bounds[0]).max() > seq_len + 1:
            raise DocumentError(f"{split}.rows has more than {seq_len + 1:,} tokens in a row")


def _write_rows(folder: Path, *, store: TokenStore, seq_len: int) -> None:
    for split in get_args(Split):
        offsets = store.offsets(split)
        if store.meta.marks:
            cuts = store.packing == CUT_PACKING
            starts, lengths = fit_chats(offsets, tokens=store.tokens(split), capacity=seq_len + 1, cuts=cuts)
        else:
            starts, lengths = divide(offsets, seq_len=seq_len)
        row_of_chunk = best_fit(lengths, capacity=seq_len + 1)
        order = np.argsort(row_of_chunk, kind="stable")
        rows = np.concatenate([[0], np.cumsum(np.bincount(row_of_chunk))]).astype(np.int64)
        for name, array in zip(CHUNK_FILES, (rows, starts[order], lengths[order]), strict=True):
            write_atomically(folder / f"{split}.{name}", array.tobytes())
        if split == "train":
            _report(store, documents=np.diff(offsets), lengths=lengths, num_rows=len(rows) - 1, seq_len=seq_len)


def _report(store: TokenStore, *, documents: np.ndarray, lengths: np.ndarray, num_rows: int, seq_len: int) -> None:
    room = num_rows * (seq_len + 1)
    cut = np.count_nonzero(documents > seq_len + 1)
    if store.meta.marks:
        left_out = len(documents) - len(lengths)
        if cut:
            text = "%s: %s of %s chats are longer than %s tokens: %s are left out, and %s cut after a turn"
            counts = (cut, len(documents), seq_len + 1, left_out, cut - left_out)
            logger.warning(text, store.meta.source, *(f"{each:,}" for each in counts))
        cut -= left_out
    logger.info(
        "packed %s into %s rows of %s tokens: %.2f %% of the documents are cut, %.3f %% of the rows are padding",
        *(store.meta.source, f"{num_rows:,}", f"{seq_len + 1:,}"),
        *(100 * cut / max(1, len(documents)), 100 * (1 - lengths.sum() / max(1, room))),
    )


def fit_chats(offsets: np.ndarray, *, tokens: Tokens, capacity: int, cuts: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and length of the chats that fit into a row; longer ones are cut after a turn that is a target.

    Left out are those in which no such turn ends in time, and without `cuts` all that are longer.
    """
    starts, lengths = offsets[:-1], np.diff(offsets)
    for index in np.flatnonzero(lengths > capacity).tolist() if cuts else ():
        is_target = tokens[starts[index] : starts[index] + capacity + 1] >> ID_BITS & TARGET > 0
        ends = 1 + np.flatnonzero(is_target[:-1] & ~is_target[1:])
        lengths[index] = capacity if is_target.all() else ends.max(initial=0)
    fits = (lengths > 0) & (lengths <= capacity)
    return starts[fits], lengths[fits]


def divide(offsets: np.ndarray, *, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and length of the chunks of each document: parts overlap by the token that is target and input."""
    documents = np.diff(offsets)
    counts = np.maximum(1, -(-(documents - 1) // seq_len))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + number * seq_len
    return starts, np.minimum(seq_len + 1, np.repeat(offsets[1:], counts) - starts)


def best_fit(lengths: np.ndarray, *, capacity: int) -> np.ndarray:
    """Returns the row of each chunk, rows counted from 0: best-fit decreasing, over all chunks of a length at once.

    A row with room for k chunks of the length takes as many before the next one with as much room.
    """
    row_of_chunk = np.empty(len(lengths), dtype=np.int64)
    rows_by_room: dict[int, list[np.ndarray]] = {}
    has_room = np.zeros(capacity + 1, dtype=bool)
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for chunks in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[chunks[0]]) if len(chunks) else capacity
        while len(chunks):
            room = length + int(has_room[length:].argmax())
            if not has_room[room]:
                room = capacity
                rows = num_rows + np.arange(-(-len(chunks) // (room // length)))
                num_rows += len(rows)
            else:
                rows = np.concatenate(rows_by_room.pop(room))
                has_room[room] = False
            each = room // length
            placed = min(len(chunks), each * len(rows))
            row_of_chunk[chunks[:placed]] = np.repeat(rows, each)[:placed]
            full, rest = divmod(placed, each)
            left = {room - each * length: rows[:full], room: rows[full + (rest > 0) :]}
            left.setdefault(room - rest * length, rows[full : full + (rest > 0)])
            for room_left, rows_left in left.items():
                if len(rows_left) and room_left:
                    rows_by_room.setdefault(room_left, []).append(rows_left)
                    has_room[room_left] = True
            chunks = chunks[placed:]
    return row_of_chunk
