"""Token stores: a source tokenized once to disk, then read by memory map.

    <cache>/stores/<key>/{train,validation}.tokens      token ids, eos after every text (uint16 or uint32)
                         {train,validation}.marks       of chats only: the mark of each token, see marks.py (uint8)
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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from torchtitan_clone.cache_folders import user_cache_folder
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data
from torchtitan_clone.data.marks import END, ID_BITS, TARGET, MarkedTokens, Rendered, ids_of, marks_of
from torchtitan_clone.data.slices import Segment, TokenArray, Tokens, map_numbers
from torchtitan_clone.documents import DocumentError, Value, open_regular, read_json
from torchtitan_clone.files import sync_folder, write_atomically

if TYPE_CHECKING:
    from torchtitan_clone.data.tokenizer import Tokenizer
    from torchtitan_clone.storage.blocks import BlockFiles

logger = logging.getLogger("torchtitan_clone")

Split = Literal["train", "validation"]
FORMAT = 1
META_FILE = "meta.json"
PART_BYTES = 1 << 28
"""A file of this size is a part, which is tokenized at once, and so are several smaller ones together."""
COUNTS = ("tokens", "documents", "text_bytes", "token_bytes", "special_tokens")
"""What StoreMeta counts in each split."""
OF_CHATS = ("marks", "targets", "without_targets")
"""What StoreMeta has of chats only."""
SEGMENTS_FILE = "segments.json"
CHECKED_DOCUMENTS = 64
"""Documents of each split whose end is looked at when a store is opened."""
_MAX_TEXT = 1 << 20
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@dataclass(frozen=True, kw_only=True)
class StoreKey:
    """Everything that determines the content of a store."""

    format: int
    source_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    held_out_fraction: float


def key_of(source_fingerprint: str, *, tokenizer: "Tokenizer", held_out_fraction: float) -> StoreKey:
    """Returns the key of the store of a source."""
    return StoreKey(
        format=FORMAT,
        source_fingerprint=source_fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        held_out_fraction=held_out_fraction,
    )


def cache_folder(data: Data) -> Path:
    """Returns the folder of all that is prepared."""
    return user_cache_folder() if data.cache_folder is None else Path(data.cache_folder)


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
    special_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Special tokens that the text of each split spells out; empty in stores of older versions."""
    marks: dict[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of the marks of each split; empty in stores of text."""
    targets: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of each split that are marked as targets; empty in stores of text."""
    without_targets: int = 0
    """Chats that are left out because they have no turn to train on."""


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
    remote: "BlockFiles | None" = None
    """Where tokens and marks are read from, if they are in an object store; the folder has the other files."""

    @property
    def fingerprint(self) -> str:
        """Identifies the documents, their marks and their packing."""
        name = self.meta.source_fingerprint
        name = f"{name} marks {digest_of(self.meta.marks)[:16]}" if self.meta.marks else name
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
        ids = self._numbers(f"{split}.tokens", dtype=self.dtype)
        return MarkedTokens(ids, marks=self._numbers(f"{split}.marks", dtype="uint8")) if self.meta.marks else ids

    def offsets(self, split: Split) -> np.ndarray:
        return self._map(f"{split}.offsets", dtype="int64")

    def _numbers(self, name: str, *, dtype: str) -> Tokens:
        return self._map(name, dtype=dtype) if self.remote is None else self.remote.array(name, dtype=dtype)

    def check_size(self, name: str, *, expected: int) -> None:
        """DocumentError if a file of the store has another size in bytes."""
        if self.remote is not None:
            size = self.remote.sizes[name]
        else:
            with open_regular(self.folder / name) as file:
                size = os.fstat(file.fileno()).st_size
        if size != expected:
            raise DocumentError(f"{name} has {size:,} bytes, not {expected:,}")

    def _map(self, name: str, *, dtype: str) -> np.ndarray:
        return map_numbers(self.folder / name, dtype=dtype)


def digest_of(value: object) -> str:
    """Returns the sha256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def dtype_of_ids(vocab_size: int) -> str:
    """Returns the smallest type of a token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def is_held_out(document: str | Rendered | np.ndarray, *, fraction: float) -> bool:
    """Returns whether a document is for validation; depends on its content only, so copies are in the same split."""
    return fraction > 0 and unit_hash(content_of(document)) <= fraction


def content_of(document: str | Rendered | np.ndarray) -> bytes:
    """Returns what identifies a document: its text in UTF-8, its messages, or its token ids."""
    if isinstance(document, Rendered):
        return document.content
    return document.encode() if isinstance(document, str) else document.astype("<i8").tobytes()


def unit_hash(content: bytes) -> float:
    """Returns a hash in [0, 1]."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


class SplitWriter:
    """Writes the tokens and offsets of a split; of chats also the marks, where a `dtype` of the ids alone is given."""

    def __init__(self, folder: Path, split: Split, *, dtype: str | None = None) -> None:
        self._tokens = (folder / f"{split}.tokens").open("wb")
        self._marks = (folder / f"{split}.marks").open("wb") if dtype else None
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._offsets = (folder / f"{split}.offsets").open("wb")
        self._offsets.write(np.zeros(1, dtype=np.int64).tobytes())
        self.tokens = self.documents = self.text_bytes = self.token_bytes = self.special_tokens = self.targets = 0

    def append(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        *,
        text_bytes: int = 0,
        token_bytes: int = 0,
        special_tokens: int = 0,
    ) -> None:
        """Writes the tokens of documents of these lengths; the other numbers are those of StoreMeta."""
        if self._marks is not None and (marks := marks_of(tokens)) is not None:
            self._marks.write(marks.data)
            self._digest.update(marks.data)
            self.targets += int(np.count_nonzero(marks & TARGET))
            tokens = ids_of(tokens).astype(self._dtype)
        self._tokens.write(tokens.data)
        self._offsets.write((self.tokens + np.cumsum(lengths)).tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self.text_bytes += int(text_bytes)
        self.token_bytes += int(token_bytes)
        self.special_tokens += int(special_tokens)

    @property
    def marks(self) -> str:
        """SHA-256 of the marks."""
        return self._digest.hexdigest()

    def close(self) -> None:
        for file in filter(None, (self._tokens, self._offsets, self._marks)):
            file.flush()
            os.fsync(file.fileno())
            file.close()


def write_meta(meta: StoreMeta, *, folder: Path) -> None:
    """Completes the content of a store."""
    content = {name: value for name, value in asdict(meta).items() if meta.marks or name not in OF_CHATS}
    write_atomically(folder / META_FILE, json.dumps(content, indent=2).encode())


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
    folder: Path, *, key: StoreKey, files: tuple[Path, ...] = (), packing: str = "concatenate",
    remote: "BlockFiles | None" = None,
) -> TokenStore:  # fmt: skip
    """Opens the store of a key after comparing it with its files; ConfigError if they do not agree.

    `files` are those of the source, of which a store without tokens says where they are. What is in an object store is
    compared with its digests when it is read.
    """
    try:
        meta = read_meta(folder / META_FILE)
        if changed := [name for name, value in asdict(key).items() if getattr(meta, name) != value]:
            raise DocumentError(f"meta.json: it is that of another store, with another {', '.join(changed)}")
        segments = read_segments(folder / SEGMENTS_FILE, files=files) if (folder / SEGMENTS_FILE).exists() else {}
        store = TokenStore(folder=folder, meta=meta, files=files, segments=segments, packing=packing, remote=remote)
        for split in get_args(Split):
            _check_tokens(store, split)
            store.check_size(f"{split}.offsets", expected=(meta.documents[split] + 1) * 8)
            if meta.marks:
                store.check_size(f"{split}.marks", expected=meta.tokens[split])
            if remote is None:
                if meta.marks:
                    path = folder / f"{split}.marks"
                    _check_marks(path, digest=meta.marks[split], changed=path.stat().st_mtime_ns)
                check_documents(store, split)
    except (FileNotFoundError, DocumentError) as error:
        raise corrupt_store_error(folder, reason=str(error)) from error
    return store


def total(stores: Sequence[TokenStore], name: str) -> dict[str, int]:
    """Returns the sums of a count by split; none if one of the stores, made by an older version, has not counted."""
    counts = [getattr(store.meta, name) for store in stores]
    return {split: sum(count[split] for count in counts) for split in get_args(Split)} if all(counts) else {}


def inner_ends(store: TokenStore, *, block: int = 1 << 24) -> int:
    """Returns how often the end-of-text token stands within documents; reads all tokens."""
    splits = [store.tokens(split) for split in get_args(Split)]
    blocks = (tokens[start : start + block] for tokens in splits for start in range(0, len(tokens), block))
    ends = sum(int(np.count_nonzero(np.asarray(tokens) == store.meta.eos_id)) for tokens in blocks)
    return ends - sum(store.meta.documents.values())


def has_one_document(folder: Path) -> bool:
    """Returns whether a store exists, and both splits together have one document."""
    try:
        return sum(read_meta(folder / META_FILE).documents.values()) == 1
    except (FileNotFoundError, DocumentError):
        return False  # opening it says what is wrong


def read_meta(path: Path) -> StoreMeta:
    """Reads meta.json; DocumentError if it is none."""
    document = read_json(path)
    present = document.plain_entries()
    # An older version did not count them.
    absent = [name for name in COUNTS[2:] if name not in present]
    absent += [] if "marks" in present else OF_CHATS
    table = document.table(*(field.name for field in fields(StoreMeta) if field.name not in absent))
    counts = {name: _counts(table[name]) for name in COUNTS[2:] if name in table and table[name].value != {}}
    marks: dict[str, str] = {}
    if "marks" in table:
        of_split = table["marks"].table(*get_args(Split))
        counts |= {"targets": _counts(table["targets"])}
        marks = {split: digest.text(pattern="[0-9a-f]{64}") for split, digest in of_split.items()}
    return StoreMeta(
        marks=marks,
        without_targets=table["without_targets"].integer() if marks else 0,
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
        store.check_size(f"{split}.tokens", expected=expected * np.dtype(store.dtype).itemsize)
    elif (count := len(store.tokens(split))) != expected:
        raise DocumentError(f"{SEGMENTS_FILE}: the {split} split has {count:,} tokens, not {expected:,}")


@cache  # stores are opened several times
def _check_marks(path: Path, *, digest: str, changed: int) -> None:
    with open_regular(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise DocumentError(f"{path.name} is not what was written")


def check_documents(store: TokenStore, split: Split) -> None:
    """Looks at the ends of some documents: offsets increase to the number of tokens, and an end is before each."""
    tokens, offsets = store.tokens(split), store.offsets(split)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise DocumentError(f"{split}.offsets does not reach from 0 to the number of tokens in {split}.tokens")
    chosen = np.linspace(0, len(offsets) - 1, min(len(offsets), CHECKED_DOCUMENTS)).astype(np.int64)[1:]
    starts, ends = offsets[chosen - 1], offsets[chosen]
    if not np.all((starts >= 0) & (starts < ends) & (ends <= len(tokens))):
        raise DocumentError(f"{split}.offsets does not increase")
    last = np.array([tokens[end - 1 : end][0] for end in ends.tolist()], dtype=np.int64)
    if not np.all(last >> ID_BITS & END if store.meta.marks else last == store.meta.eos_id):
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
