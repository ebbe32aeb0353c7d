"""Reads rows from a dataset of the Hugging Face hub, which is tokenized while it is downloaded.

In epoch e, stream v of G reads the documents whose index i satisfies (i + e) mod G = v, and cuts them into rows. The
cursors (epoch, document, token) of the first tokens that are not used are the complete state, on any number of ranks. A
rank reads the documents once for all its streams. A *bookmark* is a place in the files from which reading can resume.
"""

import copy
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install, toml_like
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data.dataset import (
    BatchSlice,
    Bookmark,
    Cursor,
    DatasetIdentity,
    HeldOutRows,
    RowChunk,
    RowReader,
    StreamPosition,
    StreamState,
)
from torchtitan_clone.data.encoder import find_targets, spelling_counter
from torchtitan_clone.data.marks import CHAT, END, TARGET, ChatOptions, Rendered, RowRenderer, with_marks
from torchtitan_clone.data.reports import describe_spelled
from torchtitan_clone.data.sources import PARSED, BadRows, text_of_row, warn_once
from torchtitan_clone.data.token_store import Split, digest_of, is_held_out
from torchtitan_clone.data.tokenizer import Tokenizer
from torchtitan_clone.documents import DocumentError, Value, parse_json, shorten

if TYPE_CHECKING:
    import datasets

Document = str | list[Rendered]
"""A text, or the texts of a chat, which are one after another."""
DocumentChunk = tuple[Bookmark, list[Document | None]]
"""Consecutive documents, and the bookmark of the first; None: a document that is skipped."""
CHUNK_DOCUMENTS = 64
START: Bookmark = (0, 0, None)
_MAX_STATE = 1 << 24  # characters of a bookmark's state


def _stream_to_plain(stream: StreamState) -> dict[str, object]:
    return {"cursors": [list(cursor) for cursor in stream.cursors], "bookmark": list(stream.bookmark)}


def _stream_from_plain(state: Mapping[str, Any]) -> StreamState | None:
    """Returns the position that `_stream_to_plain` wrote, None if there is none; DocumentError if it is damaged."""
    if "cursors" not in state:
        return None
    rows = [item.integers(count=3) for item in Value(state["cursors"], where="cursors").items()]
    if not rows:
        raise DocumentError("cursors: must not be empty")
    bookmark = _bookmark_from_json(Value(state.get("bookmark", [*START]), where="bookmark"))
    return StreamState(cursors=[(epoch, document, token) for epoch, document, token in rows], bookmark=bookmark)


def streams_to_plain(streams: list[StreamState]) -> dict[str, object]:
    """Returns the positions in all hub datasets as plain data; that in a single one without a list."""
    if len(streams) == 1:
        return _stream_to_plain(streams[0])
    return {"streams": [_stream_to_plain(stream) for stream in streams]} if streams else {}


def streams_from_plain(state: Mapping[str, Any]) -> list[StreamState]:
    """Returns the positions that `streams_to_plain` wrote; DocumentError if they are damaged."""
    entries = [item.plain_entries() for item in Value(state.get("streams", [state]), where="streams").items()]
    return [stream for entry in entries if (stream := _stream_from_plain(entry)) is not None]


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A streamed dataset and how to read its text. Can be pickled."""

    is_mixture: ClassVar[bool] = False
    name: str
    revision: str
    stream: "datasets.IterableDataset"
    tokenizer: Tokenizer
    text_key: str
    held_out_fraction: float
    max_bad_rows: int
    renderer: RowRenderer | None = None
    """Of chats; None: the rows hold text."""

    @property
    def identity(self) -> DatasetIdentity:
        parsed = [PARSED] if self.tokenizer.parse_special_tokens else []
        rendered = [] if self.renderer is None else [f"chats {self.renderer.identity}"]
        return DatasetIdentity(
            data=digest_of([self.name, self.revision, self.text_key, *parsed, *rendered]),
            tokenizer=self.tokenizer.fingerprint,
            eos_id=self.tokenizer.eos_id,
            held_out_fraction=self.held_out_fraction,
        )

    def train_reader(
        self, batch_slice: BatchSlice, *, seed: int, samples: int, streams: list[StreamState]
    ) -> RowReader:
        """Returns a reader of the rows after a position; their order is the dataset's, whatever the seed."""
        start = start_of_streams(streams[0] if streams else None, size=batch_slice.global_batch_size)
        return RowReader(batch_slice, read=partial(self._read_train, start=start, seq_len=batch_slice.seq_len))

    def validation_reader(self, batch_slice: BatchSlice) -> HeldOutRows:
        return partial(self._read_validation, batch_slice)

    def _read_train(self, rows: range, *, start: StreamState, seq_len: int) -> Iterator[RowChunk]:
        streams = HubStreams(self, rows=rows, start=start)
        while True:
            yield np.stack([streams.next_row(row, seq_len=seq_len) for row in rows]), [streams.position()]

    def _read_validation(self, batch_slice: BatchSlice) -> Iterator[tuple[np.ndarray, int, int]]:
        rows = self._held_out_rows(batch_slice.seq_len)
        while batch := list(islice(rows, batch_slice.global_batch_size)):
            selected = [batch[min(index, len(batch) - 1)] for index in batch_slice.rows]
            yield np.stack(selected), sum(index >= len(batch) for index in batch_slice.rows), 0

    def _held_out_rows(self, seq_len: int) -> Iterator[np.ndarray]:
        stream = _TokenBuffer((0, 0, 0))
        for bookmark, documents in self._read_epoch(START, split="validation"):
            self.distribute(documents, bookmark=bookmark, streams={0: stream}, num_streams=1)
            while stream.size > seq_len:
                yield stream.pop_row(seq_len)

    def distribute(
        self, chunk: list[Document | None], *, bookmark: Bookmark, streams: "dict[int, _TokenBuffer]", num_streams: int
    ) -> None:
        """Tokenizes the documents of a chunk that belong to these streams, and appends them."""
        epoch, first, _ = bookmark
        chosen = [
            (number, row, document)
            for number, document in enumerate(chunk, start=first)
            if document is not None and (row := (number + epoch) % num_streams) in streams
        ]
        encoded = self._encode([document for *_, document in chosen])
        for (number, row, _), tokens in zip(chosen, encoded, strict=True):
            streams[row].append(tokens, epoch=epoch, document=number)

    def _encode(self, documents: list[Document]) -> Iterator[np.ndarray]:
        """Yields the tokens of each document with its end; of chats with their marks."""
        texts = [document for document in documents if isinstance(document, str)]
        for ids in self.tokenizer.encode_batch(texts):
            yield np.array([*ids, self.tokenizer.eos_id], dtype=np.int64)
        for chat in (document for document in documents if isinstance(document, list)):  # then there are no texts
            yield np.concatenate([self._encode_chat(each) for each in chat])

    def _encode_chat(self, chat: Rendered) -> np.ndarray:
        encoding = self.tokenizer.encode_alone(chat.text)
        marks = CHAT | TARGET * np.frombuffer(find_targets(encoding, chat.spans), dtype=np.uint8)
        marks[-1:] |= END
        return with_marks(np.array(encoding.ids, dtype=np.int64), marks=marks)

    def read_epochs(self, bookmark: Bookmark) -> Iterator[DocumentChunk]:
        """Yields the training documents from a bookmark on, epoch after epoch."""
        while True:
            yield from self._read_epoch(bookmark, split="train")
            bookmark = (bookmark[0] + 1, 0, None)

    def _read_epoch(self, bookmark: Bookmark, *, split: Split) -> Iterator[DocumentChunk]:
        """Yields documents from a bookmark to the end of its epoch; ConfigError if one of training has no text."""
        epoch, document, state = bookmark
        stream = copy.deepcopy(self.stream)  # it keeps its position
        if state is not None:
            self._resume(stream, state)
        bad_rows = BadRows(limit=self.max_bad_rows)
        parses = self.tokenizer.parse_special_tokens  # as chats do
        count = None if parses else spelling_counter(self.tokenizer.backend)
        readable = False
        # Not iter(stream): in a worker process it yields only some of the rows, and which ones depends on the worker.
        for columns in stream.iter(CHUNK_DOCUMENTS):
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            documents = [
                self._document(row, place=f"{self.name}, row {number}", split=split, bad_rows=bad_rows)
                for number, row in enumerate(rows, start=document)
            ]
            readable = readable or any(documents)
            if count is not None and any(count(text) for text in documents if isinstance(text, str)):
                warn_once(describe_spelled(self.name))
                count = None
            yield (epoch, document, state), documents
            document += len(documents)
            state = json.dumps(stream.state_dict())
        if split == "train" and not readable and bookmark[1] == 0:
            column = f"text in column {toml_like(self.text_key)} (training.text_key)"
            what = column if self.renderer is None else "chats that have a turn to train on"
            raise ConfigError(
                f"training.dataset = {toml_like(self.name)}: no train text in {document:,} rows; set it to a dataset "
                f"with {what}, or change data.held_out_fraction (now {self.held_out_fraction})."
            )

    def _resume(self, stream: "datasets.IterableDataset", state: str) -> None:
        try:
            place = parse_json(state, where="bookmark")
            _check_state(place, like=stream.state_dict())
            stream.load_state_dict(cast("dict[str, Any]", place.value))
        except Exception as error:  # the library reads the state without checking it
            reason = shorten(f"{type(error).__name__}: {error}")
            raise ConfigError(f"the position in {self.name} that the checkpoint holds is damaged: {reason}") from error

    def _document(self, row: object, *, place: str, split: Split, bad_rows: BadRows) -> Document | None:
        try:
            document = text_of_row(row, text_key=self.text_key) if self.renderer is None else self._chat(row)
        except ValueError as error:
            bad_rows.add(place, error=error)
            return None
        if not document:
            return None
        content = document if isinstance(document, str) else document[0]
        in_split = is_held_out(content, fraction=self.held_out_fraction) == (split == "validation")
        return document if in_split else None

    def _chat(self, row: object) -> list[Rendered]:
        from torchtitan_clone.data.chat import render_row, without_nulls

        assert self.renderer is not None
        return render_row(without_nulls(row), renderer=self.renderer)


def open_hub(dataset: str, *, training: Training, data: Data, tokenizer: Tokenizer) -> HubDataset:
    """Opens "org/name[@revision][:configuration]", by default at its newest commit; ConfigError if that fails."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"training.dataset = {toml_like(dataset)}: streaming from the Hugging Face hub needs the package datasets; "
            f"{install('datasets')}, or set training.dataset_path to local files."
        ) from error
    if data.packing != "concatenate":
        rule = f"the documents of {dataset} are streamed, and only stored ones are packed"
        raise ConfigError(f'data.packing = "{data.packing}": {rule}; set it to "concatenate".')
    if data.drop_duplicates:
        rule = f"the documents of {dataset} are streamed, and only stored ones can be compared"
        raise ConfigError(f"data.drop_duplicates = true: {rule}; set it to false, or download the dataset.")
    renderer = None
    if training.format == "chat":
        from torchtitan_clone.data.chat import renderer_of

        renderer = renderer_of(ChatOptions.of(training), tokenizer=tokenizer)
        tokenizer = tokenizer.parsing_special_tokens(option='training.format = "chat"')
    elif training.parse_special_tokens:
        tokenizer = tokenizer.parsing_special_tokens()
    repository, separator, configuration = dataset.partition(":")
    name, _, revision = repository.partition("@")
    try:
        builder = datasets.load_dataset_builder(name, configuration or None, revision=revision or None)
        stream = builder.as_streaming_dataset(split="train")
    except Exception as error:
        raise ConfigError(
            f"training.dataset = {toml_like(dataset)}: cannot be opened: {error}; check its name, configuration and "
            "access, or set training.dataset_path to local files."
        ) from error
    return HubDataset(
        name=name + separator + configuration,  # a run may name later the commit with which it began
        revision=f"{builder.hash} {builder.config.data_files}",
        stream=cast("datasets.IterableDataset", stream),  # the type of one split
        tokenizer=tokenizer,
        renderer=renderer,
        text_key=training.text_key,
        held_out_fraction=data.held_out_fraction,
        max_bad_rows=data.max_bad_rows,
    )


def _check_state(state: Value, *, like: object) -> None:
    """Compares a state with that of a stream at its start: the library ignores one that it does not expect."""
    if isinstance(like, dict):
        entries = state.entries()
        for key, value in cast("dict[str, object]", like).items():
            _check_state(entries.get(key, Value(None, where=f"{state.where}: {key}")), like=value)
        if "epoch" in like and entries["epoch"].value != like["epoch"]:
            entries["epoch"].refuse(f"must be {like['epoch']}")
    elif isinstance(like, list):
        for item, value in zip(state.items(count=len(like)), cast("list[object]", like), strict=True):
            _check_state(item, like=value)
    elif isinstance(like, str):
        state.choice(like)
    elif isinstance(like, int):
        state.integer()


class _TokenBuffer:
    """Tokens of a stream that are read and not yet used, and the cursor of the first."""

    def __init__(self, cursor: Cursor) -> None:
        self._start = cursor
        self._documents: deque[tuple[Cursor, np.ndarray]] = deque()
        self.size = 0

    @property
    def cursor(self) -> Cursor:
        return self._documents[0][0] if self._documents else self._start

    def append(self, tokens: np.ndarray, *, epoch: int, document: int) -> None:
        if (epoch, document) < self._start[:2]:
            return
        used = self._start[2] if (epoch, document) == self._start[:2] else 0
        if len(unused := tokens[used:]):
            self._documents.append(((epoch, document, used), unused))
            self.size += len(unused)

    def pop_row(self, seq_len: int) -> np.ndarray:
        """Removes the next seq_len of more tokens; returns them and the one after, which is the next row's first."""
        slices: list[np.ndarray] = []
        missing = seq_len
        while missing:
            (epoch, document, token), tokens = self._documents.popleft()
            slices.append(tokens[:missing])
            if len(tokens) > missing:
                self._documents.appendleft(((epoch, document, token + missing), tokens[missing:]))
            missing -= len(slices[-1])
        self.size -= seq_len
        return np.concatenate([*slices, self._documents[0][1][:1]])


class HubStreams:
    """Some streams of a hub dataset, by the row of the global batch; each is read as far as its rows are asked for."""

    def __init__(self, dataset: HubDataset, *, rows: Iterable[int], start: StreamState) -> None:
        self._dataset = dataset
        self._num_streams = len(start.cursors)
        self._streams = {row: _TokenBuffer(start.cursors[row]) for row in rows}
        self._chunks = dataset.read_epochs(start.bookmark)
        self._bookmarks: deque[Bookmark] = deque([start.bookmark])

    def next_row(self, row: int, *, seq_len: int) -> np.ndarray:
        """Removes and returns the next tokens [T + 1] of a stream."""
        while self._streams[row].size <= seq_len:
            bookmark, documents = next(self._chunks)
            self._bookmarks.append(bookmark)
            self._dataset.distribute(documents, bookmark=bookmark, streams=self._streams, num_streams=self._num_streams)
        return self._streams[row].pop_row(seq_len)

    def position(self, *, first_index: int = 0) -> StreamPosition:
        """Returns the position after the rows so far, with the streams numbered from `first_index`."""
        cursors = {first_index + row: stream.cursor for row, stream in self._streams.items()}
        while len(self._bookmarks) > 1 and self._bookmarks[1][:2] <= min(cursors.values())[:2]:
            self._bookmarks.popleft()
        return list(cursors.items()), self._bookmarks[0]


def start_of_streams(state: StreamState | None, *, size: int) -> StreamState:
    """Returns the position that this many streams start from; where their number changed, the most advanced cursor."""
    if state is None:
        return StreamState(cursors=[(0, 0, 0)] * size, bookmark=START)
    if len(state.cursors) == size:
        return state
    epoch, document, _ = max(state.cursors)
    return StreamState(cursors=[(epoch, document, 0)] * size, bookmark=state.bookmark)


def merge_positions(positions: Iterable[StreamPosition], *, num_rows: int) -> list[StreamState]:
    """Merges the positions of all ranks, where each hub dataset has as many streams as the global batch has rows."""
    cursors: dict[int, dict[int, Cursor]] = {}
    bookmarks: dict[int, list[Bookmark]] = {}
    for cursors_of_rank, (epoch, document, place) in positions:
        index = cursors_of_rank[0][0] // num_rows
        by_row = {row: (first, second, token) for row, (first, second, token) in cursors_of_rank}
        cursors[index] = cursors.get(index, {}) | by_row
        bookmarks[index] = [*bookmarks.get(index, []), (epoch, document, place)]
    return [
        StreamState(
            cursors=[cursors[index][row] for row in sorted(cursors[index])],
            bookmark=min(bookmarks[index], key=lambda bookmark: bookmark[:2]),
        )
        for index in sorted(cursors)
    ]


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
