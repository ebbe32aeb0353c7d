"""Batches from a dataset of the Hugging Face hub, tokenized while it is downloaded.

Each row of the global batch is a *stream*: in epoch e, stream v of G reads the documents whose index i has
(i + e) mod G = v, one after another, and cuts what it reads into rows. A *cursor* (epoch, document, token) is the first
token that a stream has not used up. The cursors are the whole state: who runs a stream does not matter. A rank reads
the documents once for all its streams and keeps those that its streams are not ready for. A *bookmark* is a place in
the files from which reading can go on without starting at their beginning.
"""

import copy
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Data, Training
from torchtitan_clone.data.fingerprint import digest_of
from torchtitan_clone.data.row_reader import BatchSlice, Note, RowReader
from torchtitan_clone.data.sources import BadRows, text_of_row
from torchtitan_clone.data.token_store import Split, is_held_out
from torchtitan_clone.data.tokenizer import Tokenizer

Cursor = tuple[int, int, int]
"""Epoch, document within the epoch, token within the document."""
Bookmark = tuple[int, int, str | None]
"""Epoch, document, and the library's own state there as JSON; None: at the start of the epoch."""

CHUNK_DOCUMENTS = 64  # read and tokenized at a time
START: Bookmark = (0, 0, None)


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A streamed dataset and how its text is read. Can be sent to another process."""

    name: str
    revision: str
    stream: Any
    """A datasets.IterableDataset."""
    tokenizer: Tokenizer
    text_key: str
    held_out_fraction: float
    max_bad_rows: int

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the rows, in a checkpoint's words."""
        return {
            "data": digest_of([self.name, self.revision, self.text_key]),
            "tokenizer": self.tokenizer.fingerprint,
            "eos_id": self.tokenizer.eos_id,
            "held_out_fraction": self.held_out_fraction,
        }

    def train_reader(self, share: BatchSlice, *, seed: int, samples: int, position: Mapping[str, Any]) -> "_StreamFeed":
        """Rows from a position on; the order is the dataset's, whatever the seed."""
        cursors = [tuple(cursor) for cursor in position.get("cursors", [])]
        if cursors and len(cursors) != share.global_batch_size:
            # Other streams than before: all of them go on behind the foremost.
            cursors = [(*max(cursors)[:2], 0)] * share.global_batch_size
        bookmark = position.get("bookmark", START)
        return _StreamFeed(
            self, share=share, cursors=cursors or [(0, 0, 0)] * share.global_batch_size, bookmark=bookmark
        )

    def validation_reader(self, share: BatchSlice) -> "_HeldOutFeed":
        """Rows of the held-out documents."""
        return _HeldOutFeed(dataset=self, share=share)

    def epoch(self, bookmark: Bookmark, *, split: Split) -> Iterator[tuple[Bookmark, list[str | None]]]:
        """Yield documents from a bookmark to the end of its epoch in chunks, each with the bookmark of its start.

        None stands for what is not in the split or cannot be read; ConfigError if a whole epoch is nothing but that.
        """
        epoch, document, state = bookmark
        stream = copy.deepcopy(self.stream)  # it remembers where it was
        if state is not None:
            stream.load_state_dict(json.loads(state))
        bad_rows, readable = BadRows(limit=self.max_bad_rows), False
        # Not iter(stream), which in a worker process yields only a part of the rows, and not the same everywhere.
        for columns in stream.iter(CHUNK_DOCUMENTS):
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            texts = [
                self._text(row, place=f"{self.name}, row {number}", split=split, bad_rows=bad_rows)
                for number, row in enumerate(rows, start=document)
            ]
            readable = readable or any(texts)
            yield (epoch, document, state), texts
            document += len(texts)
            state = json.dumps(stream.state_dict())
        if not readable and bookmark[1] == 0:
            raise ConfigError(
                f"training.dataset = {self.name!r} has no {split} text in {document:,} rows "
                f"(data.held_out_fraction is {self.held_out_fraction})"
            )

    def _text(self, row: object, *, place: str, split: Split, bad_rows: BadRows) -> str | None:
        try:
            text = text_of_row(row, text_key=self.text_key)
        except ValueError as error:
            bad_rows.add(place, reason=str(error))
            return None
        in_split = is_held_out(text, fraction=self.held_out_fraction) == (split == "validation")
        return text if text and in_split else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each document, eos included."""
        eos_id = self.tokenizer.eos_id
        return [np.array([*ids, eos_id], dtype=np.int64) for ids in self.tokenizer.encode_batch(texts)]


def open_hub(dataset: str, *, training: Training, data: Data, tokenizer: Tokenizer) -> HubDataset:
    """Open "org/name", or "org/name:configuration", at its newest revision; ConfigError if that fails."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"training.dataset = {dataset!r} is streamed from the Hugging Face hub, which needs "
            '`pip install "torchtitan_clone[data]"`; for local files set training.dataset_path'
        ) from error
    name, _, configuration = dataset.partition(":")
    try:
        builder = datasets.load_dataset_builder(name, configuration or None)
        stream = builder.as_streaming_dataset(split="train")
    except Exception as error:
        raise ConfigError(f"training.dataset = {dataset!r} cannot be opened: {error}") from error
    return HubDataset(
        name=dataset,
        revision=f"{builder.hash} {builder.config.data_files}",
        stream=stream,
        tokenizer=tokenizer,
        text_key=training.text_key,
        held_out_fraction=data.held_out_fraction,
        max_bad_rows=data.max_bad_rows,
    )


class _Segments:
    """Tokens that are read and not yet used, document after document, and the cursor of the first."""

    def __init__(self, cursor: Cursor) -> None:
        self._start = cursor
        self._segments: deque[tuple[Cursor, np.ndarray]] = deque()
        self.size = 0

    @property
    def cursor(self) -> Cursor:
        return self._segments[0][0] if self._segments else self._start

    def append(self, tokens: np.ndarray, *, epoch: int, document: int) -> None:
        """Add a document, unless it, or the part of it that is left out, was used before."""
        if (epoch, document) < self._start[:2]:
            return
        used = self._start[2] if (epoch, document) == self._start[:2] else 0
        if len(rest := tokens[used:]):
            self._segments.append(((epoch, document, used), rest))
            self.size += len(rest)

    def take_row(self, seq_len: int) -> np.ndarray:
        """The next seq_len + 1 tokens, of which the last is the next row's first."""
        parts, length = [], 0
        for _, tokens in self._segments:
            parts.append(tokens)
            length += len(tokens)
            if length > seq_len:
                break
        self._use_up(seq_len)
        return np.concatenate(parts)[: seq_len + 1]

    def _use_up(self, num_tokens: int) -> None:
        self.size -= num_tokens
        while num_tokens:
            (epoch, document, token), tokens = self._segments.popleft()
            if len(tokens) > num_tokens:
                self._segments.appendleft(((epoch, document, token + num_tokens), tokens[num_tokens:]))
            num_tokens -= min(num_tokens, len(tokens))


class _StreamFeed(RowReader):
    """Rows of streams without end. A note is the cursor of each stream and one bookmark that lies before them all."""

    def __init__(
        self, dataset: HubDataset, *, share: BatchSlice, cursors: Sequence[Cursor], bookmark: Bookmark
    ) -> None:
        super().__init__(share)
        self._dataset, self._cursors, self._bookmark = dataset, cursors, bookmark

    def read(self, rows: range) -> Iterator[tuple[np.ndarray, Note]]:
        streams = {row: _Segments(self._cursors[row]) for row in rows}
        bookmarks: deque[Bookmark] = deque()
        chunks = self._chunks()
        seq_len = self.share.seq_len
        while True:
            while any(stream.size <= seq_len for stream in streams.values()):
                bookmark, texts = next(chunks)
                bookmarks.append(bookmark)
                self._distribute(texts, bookmark=bookmark, streams=streams)
            tokens = np.stack([stream.take_row(seq_len) for stream in streams.values()])
            cursors = [stream.cursor for stream in streams.values()]
            while len(bookmarks) > 1 and bookmarks[1][:2] <= min(cursors)[:2]:
                bookmarks.popleft()
            yield tokens, (list(zip(rows, cursors, strict=True)), bookmarks[0])

    def _chunks(self) -> Iterator[tuple[Bookmark, list[str | None]]]:
        bookmark = self._bookmark
        while True:
            yield from self._dataset.epoch(bookmark, split="train")
            bookmark = (bookmark[0] + 1, 0, None)

    def _distribute(self, texts: list[str | None], *, bookmark: Bookmark, streams: dict[int, _Segments]) -> None:
        epoch, first, _ = bookmark
        found = []
        for document, text in enumerate(texts, start=first):
            row = (document + epoch) % self.share.global_batch_size
            if text is not None and row in streams:
                found.append((document, row, text))
        for (document, row, _), tokens in zip(found, self._dataset.encode([text for *_, text in found]), strict=True):
            streams[row].append(tokens, epoch=epoch, document=document)


def merge_positions(notes: Iterable[Note]) -> dict[str, Any]:
    """The notes of all ranks as plain data: the cursor of every stream, and the bookmark before them all."""
    cursors: dict[int, Cursor] = {}
    bookmarks: list[Bookmark] = []
    for cursors_of_some, bookmark in notes:
        cursors |= dict(cursors_of_some)
        bookmarks.append(bookmark)
    first = min(bookmarks, key=lambda bookmark: tuple(bookmark[:2]))
    return {"cursors": [list(cursors[row]) for row in sorted(cursors)], "bookmark": list(first)}


@dataclass(frozen=True, kw_only=True)
class _HeldOutFeed:
    """All held-out documents once, as one stream from which every rank takes its rows."""

    dataset: HubDataset
    share: BatchSlice

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the rank's rows of each global batch, and how many at their end only fill it up."""
        rows, size = self._all_rows(), self.share.global_batch_size
        while batch := list(islice(rows, size)):
            indices = np.array(self.share.rows)
            padding = int(np.count_nonzero(indices >= len(batch)))
            yield np.stack([batch[index] for index in np.minimum(indices, len(batch) - 1)]), padding

    def _all_rows(self) -> Iterator[np.ndarray]:
        stream = _Segments((0, 0, 0))
        for (epoch, first, _), texts in self.dataset.epoch(START, split="validation"):
            held_out = [(document, text) for document, text in enumerate(texts, start=first) if text is not None]
            for (document, _), tokens in zip(
                held_out, self.dataset.encode([text for _, text in held_out]), strict=True
            ):
                stream.append(tokens, epoch=epoch, document=document)
            while stream.size > self.share.seq_len:
                yield stream.take_row(self.share.seq_len)
