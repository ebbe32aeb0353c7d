"""Token stores: a source tokenized once to disk, then read by memory map.

    <cache>/stores/<key>/{train,validation}.tokens      token ids, eos after every document (uint16 or uint32)
                         {train,validation}.offsets     start of each document, and the end of the last (int64)
                         meta.json                      what the store was made from, and the size of each file

The key is a hash of everything that determines the content. Token ids that another program wrote stay where they are:
such a store has *.added and segments.json instead of *.tokens, see formats.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value, open_regular, read_json
from torchtitan_clone.files import sync_folder, write_atomically

logger = logging.getLogger("torchtitan_clone")

Split = Literal["train", "validation"]
FORMAT = 1
META_FILE = "meta.json"
PART_BYTES = 1 << 28
"""A file of this size is a part, which is tokenized at once, and so are several smaller ones together."""
COUNTS = ("tokens", "documents", "text_bytes", "token_bytes")
"""What StoreMeta counts in each split."""
SEGMENTS_FILE = "segments.json"
CHECKED_DOCUMENTS = 64
"""Documents of each split whose end is looked at when a store is opened."""
_MAX_TEXT = 1 << 20
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_OPEN_FILES = 128


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive token ids of a file."""

    file: int
    """Index into the files of the source."""
    start: int
    """Offset in bytes."""
    dtype: str
    tokens: int

    def part(self, first: int, last: int) -> "Segment":
        """Returns the ids in [first, last)."""
        start = self.start + first * np.dtype(self.dtype).itemsize
        return Segment(file=self.file, start=start, dtype=self.dtype, tokens=last - first)


class Tokens(Protocol):
    """Token ids that are read in slices: an array of NumPy, or one that is put together from several."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> np.ndarray: ...


class TokenArray:
    """Token ids of several files as one array that is read in slices; opens the files as they are needed."""

    def __init__(self, segments: Sequence[Segment], *, files: Sequence[Path], added: np.ndarray, eos_id: int) -> None:
        self._segments = segments
        self._starts = np.cumsum([0, *(segment.tokens for segment in segments)])
        self._added = added
        self._eos_id = eos_id
        self._open = lru_cache(_OPEN_FILES)(lambda file: map_bytes(files[file]))
        self.dtype = np.result_type(np.uint16, np.min_scalar_type(eos_id), *{segment.dtype for segment in segments})

    def __len__(self) -> int:
        return int(self._starts[-1]) + len(self._added)

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, _ = positions.indices(len(self))
        first, last = (int(each) for each in np.searchsorted(self._added, [start, stop]))
        stored = self._stored(start - first, stop - last)
        if first == last:
            return stored
        ids = np.full(stop - start, self._eos_id, dtype=self.dtype)
        is_stored = np.ones(len(ids), dtype=bool)
        is_stored[self._added[first:last] - start] = False
        ids[is_stored] = stored
        return ids

    def _stored(self, start: int, stop: int) -> np.ndarray:
        """Returns ids by their place among those that are in the files."""
        ids = np.empty(stop - start, dtype=self.dtype)
        position = start
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while position < stop:
            segment, offset = self._segments[index], position - int(self._starts[index])
            part = segment.part(offset, min(segment.tokens, offset + stop - position))
            content = self._open(part.file)[part.start :][: part.tokens * np.dtype(part.dtype).itemsize]
            ids[position - start :][: part.tokens] = content.view(part.dtype)
            position += part.tokens
            index += 1
        return ids


def map_bytes(path: Path, *, follow_links: bool = True) -> np.ndarray:
    """Maps a file into memory as an array of bytes."""
    with open_regular(path, follow_links=follow_links) as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))


def map_numbers(path: Path, *, dtype: str) -> np.ndarray:
    """Maps a file of numbers, which no link leads to, into memory; DocumentError if it has no whole number of them."""
    content = map_bytes(path, follow_links=False)
    if rest := len(content) % np.dtype(dtype).itemsize:
        raise DocumentError(f"{path.name} has {rest} bytes after its last {dtype}")
    return content.view(dtype)


@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """Everything that determines the content of a store."""

    format: int
    source_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    held_out_fraction: float


@dataclass(frozen=True, kw_only=True)
class StoreMeta(StoreKey):
    """Content of meta.json."""

    source: str
    tokens: dict[str, int]
    documents: dict[str, int]
    bad_rows: int
    first_bad_rows: list[str]
    text_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """UTF-8 bytes of the documents of each split; 0 of token ids without text, empty in stores of older versions."""
    token_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Sum of Tokenizer.byte_lengths() over the tokens of each split, an estimate of text_bytes."""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """A complete store. Holds no open file, so that it can be pickled."""

    folder: Path
    meta: StoreMeta
    files: tuple[Path, ...] = ()
    segments: dict[Split, list[Segment]] = field(default_factory=dict[Split, list[Segment]])
    """Where in `files` the tokens of each split are, if they are read in place."""
    packing: str = "concatenate"
    """How documents become rows: data.packing."""

    @property
    def fingerprint(self) -> str:
        """Identifies the documents and their packing."""
        name = self.meta.source_fingerprint
        return name if self.packing == "concatenate" else f"{name} {self.packing}"

    @property
    def dtype(self) -> str:
        """Type of a token id in the files of the store."""
        return dtype_of_ids(self.meta.vocab_size)

    def byte_scale(self, split: Split) -> float:
        """Returns the bytes of the text of a split, relative to Tokenizer.byte_lengths() of its tokens."""
        sizes = self.meta.text_bytes.get(split), self.meta.token_bytes.get(split)
        return sizes[0] / sizes[1] if sizes[0] and sizes[1] else 1.0

    def tokens(self, split: Split) -> Tokens:
        """Returns the tokens of a split, as an array that can be sliced."""
        if self.segments:
            added = self._map(f"{split}.added", dtype="int64")
            return TokenArray(self.segments[split], files=self.files, added=added, eos_id=self.meta.eos_id)
        return self._map(f"{split}.tokens", dtype=self.dtype)

    def offsets(self, split: Split) -> np.ndarray:
        return self._map(f"{split}.offsets", dtype="int64")

    def _map(self, name: str, *, dtype: str) -> np.ndarray:
        return map_numbers(self.folder / name, dtype=dtype)


def digest_of(value: object) -> str:
    """Returns the sha256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def dtype_of_ids(vocab_size: int) -> str:
    """Returns the smallest type of a token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def is_held_out(document: str | np.ndarray, *, fraction: float) -> bool:
    """Returns whether a document is for validation; depends on its content only, so copies are in the same split."""
    return fraction > 0 and unit_hash(content_of(document)) <= fraction


def content_of(document: str | np.ndarray) -> bytes:
    """Returns what identifies a document: its text in UTF-8, or its token ids."""
    return document.encode() if isinstance(document, str) else document.astype("<i8").tobytes()


def unit_hash(content: bytes) -> float:
    """Returns a hash in [0, 1]."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


class SplitWriter:
    """Writes the tokens and offsets of a split."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._tokens = (folder / f"{split}.tokens").open("wb")
        self._offsets = (folder / f"{split}.offsets").open("wb")
        self._offsets.write(np.zeros(1, dtype=np.int64).tobytes())
        self.tokens = self.documents = self.text_bytes = self.token_bytes = 0

    def append(self, tokens: np.ndarray, lengths: np.ndarray, *, text_bytes: int = 0, token_bytes: int = 0) -> None:
        """Writes the tokens of documents of these lengths; the bytes are those of StoreMeta."""
        self._tokens.write(tokens.data)
        self._offsets.write((self.tokens + np.cumsum(lengths)).tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.text_bytes += int(text_bytes)
        self.token_bytes += int(token_bytes)

    def close(self) -> None:
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())
            file.close()


def write_meta(meta: StoreMeta, *, folder: Path) -> None:
    """Completes the content of a store."""
    write_atomically(folder / META_FILE, json.dumps(asdict(meta), indent=2).encode())


def commit(prepared: Path, folder: Path) -> None:
    """Renames a folder whose files are on disk, unless another process has made the same one."""
    sync_folder(prepared)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        prepared.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(prepared)  # the same content, prepared at the same time
    sync_folder(folder.parent)


@contextmanager
def locked(path: Path, *, name: str) -> Iterator[None]:
    """Holds the lock of what is prepared; the kernel releases it even if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # does not wait at a pipe
    with os.fdopen(os.open(path, flags, 0o666), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares %s", name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(folder: Path, *, name: str, build: Callable[[Path], None]) -> None:
    """Makes a folder in that of a store, unless it exists: complete, or not at all if this process is killed."""
    if folder.exists():
        return
    with locked(folder.parent / "lock", name=name):
        if not folder.exists():
            prepared = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(prepared, ignore_errors=True)
            prepared.mkdir()
            build(prepared)
            commit(prepared, folder)


def open_store(
    folder: Path, *, key: StoreKey, files: tuple[Path, ...] = (), packing: str = "concatenate"
) -> TokenStore:
    """Opens the store of a key after comparing it with its files; ConfigError if they do not agree.

    `files` are those of the source, of which a store without tokens says where they are.
    """
    try:
        meta = _read_meta(folder / META_FILE)
        if changed := [name for name, value in asdict(key).items() if getattr(meta, name) != value]:
            raise DocumentError(f"meta.json: it is that of another store, with another {', '.join(changed)}")
        segments = read_segments(folder / SEGMENTS_FILE, files=files) if (folder / SEGMENTS_FILE).exists() else {}
        store = TokenStore(folder=folder, meta=meta, files=files, segments=segments, packing=packing)
        for split in get_args(Split):
            _check_tokens(store, split)
            _check_size(folder / f"{split}.offsets", expected=(meta.documents[split] + 1) * 8)
            check_documents(store, split)
    except (FileNotFoundError, DocumentError) as error:
        raise corrupt_store_error(folder, reason=str(error)) from error
    return store


def has_one_document(folder: Path) -> bool:
    """Returns whether a store exists, and both splits together have one document."""
    try:
        return sum(_read_meta(folder / META_FILE).documents.values()) == 1
    except (FileNotFoundError, DocumentError):
        return False  # opening it says what is wrong


def _read_meta(path: Path) -> StoreMeta:
    document = read_json(path)
    byte_counts = ("text_bytes", "token_bytes")
    absent = () if "text_bytes" in document.plain_entries() else byte_counts  # an older version did not count them
    table = document.table(*(field.name for field in fields(StoreMeta) if field.name not in absent))
    counts = {name: _counts(table[name]) for name in byte_counts if name in table and table[name].value != {}}
    return StoreMeta(
        format=table["format"].integer(),
        source_fingerprint=table["source_fingerprint"].text(),
        tokenizer_fingerprint=table["tokenizer_fingerprint"].text(),
        vocab_size=table["vocab_size"].integer(low=1),
        eos_id=table["eos_id"].integer(),
        held_out_fraction=table["held_out_fraction"].number(low=0, high=1),
        source=table["source"].text(max_chars=_MAX_TEXT),
        tokens=_counts(table["tokens"]),
        documents=_counts(table["documents"]),
        bad_rows=table["bad_rows"].integer(),
        first_bad_rows=[item.text(max_chars=_MAX_TEXT) for item in table["first_bad_rows"].items()],
        **counts,
    )


def _counts(table: Value) -> dict[str, int]:
    return {split: count.integer() for split, count in table.table(*get_args(Split)).items()}


def _check_tokens(store: TokenStore, split: Split) -> None:
    expected = store.meta.tokens[split]
    if not store.segments:
        _check_size(store.folder / f"{split}.tokens", expected=expected * np.dtype(store.dtype).itemsize)
    elif (count := len(store.tokens(split))) != expected:
        raise DocumentError(f"{SEGMENTS_FILE}: the {split} split has {count:,} tokens, not {expected:,}")


def _check_size(path: Path, *, expected: int) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise DocumentError(f"{path.name} has {size:,} bytes, not {expected:,}")


def check_documents(store: TokenStore, split: Split) -> None:
    """Looks at the ends of some documents: offsets increase to the number of tokens, and eos is before each."""
    tokens, offsets = store.tokens(split), store.offsets(split)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise DocumentError(f"{split}.offsets does not reach from 0 to the number of tokens in {split}.tokens")
    chosen = np.linspace(0, len(offsets) - 1, min(len(offsets), CHECKED_DOCUMENTS)).astype(np.int64)[1:]
    starts, ends = offsets[chosen - 1], offsets[chosen]
    if not np.all((starts >= 0) & (starts < ends) & (ends <= len(tokens))):
        raise DocumentError(f"{split}.offsets does not increase")
    if any(tokens[end - 1 : end][0] != store.meta.eos_id for end in ends.tolist()):
        raise DocumentError(f"{split}.tokens does not hold the documents of {split}.offsets")


def corrupt_store_error(folder: Path, *, reason: str) -> ConfigError:
    """Returns the error about a store whose files are not what was written."""
    return ConfigError(f"the token store {folder} is corrupt ({reason}); delete that folder to prepare it again.")


def write_segments(path: Path, segments: Mapping[str, Sequence[Segment]]) -> None:
    """Writes where the ids of each split are."""
    content = {split: [list(vars(each).values()) for each in of_split] for split, of_split in segments.items()}
    write_atomically(path, json.dumps(content).encode())


def read_segments(path: Path, *, files: Sequence[Path]) -> dict[Split, list[Segment]]:
    """Reads what write_segments wrote, and compares it with the files; DocumentError if they do not agree."""
    table = read_json(path, max_bytes=1 << 30).table(*get_args(Split))
    sizes = [file.stat().st_size for file in files]
    return {split: [_read_segment(item, sizes=sizes) for item in table[split].items()] for split in get_args(Split)}


def _read_segment(value: Value, *, sizes: Sequence[int]) -> Segment:
    file, start, dtype, tokens = value.items(count=4)
    segment = Segment(
        file=file.integer(high=len(sizes) - 1),
        start=start.integer(),
        dtype=dtype.choice(*_INTEGERS),
        tokens=tokens.integer(),
    )
    if segment.start + segment.tokens * np.dtype(segment.dtype).itemsize > sizes[segment.file]:
        value.refuse("must lie within the file")
    return segment
