"""Token stores: a source tokenized once to disk, then read by memory map.

    <cache>/stores/<key>/{train,validation}.tokens      token ids, eos after every document (uint16 or uint32)
                         {train,validation}.offsets     start of each document, and the end of the last (int64)
                         meta.json                      what the store was made from, and the size of each file
    <cache>/sources/<source>/lock, files.json, partial/   per source: lock, hashes of its files, store in progress

The key is a hash of everything that determines the content. A store is written to partial/ under the source's lock and
renamed into place after all of it is on disk, so that it is complete or does not exist.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.config.schema import Data
from torchtitan_clone.data.encoder import TokenizerProcessError, encode_batches
from torchtitan_clone.data.sources import BadRows, Source, digest_of, read_documents, source_fingerprint
from torchtitan_clone.data.tokenizer import Tokenizer
from torchtitan_clone.documents import DocumentError, Value, open_regular, read_json, shorten
from torchtitan_clone.files import sync_folder, write_atomically

logger = logging.getLogger("torchtitan_clone")

Split = Literal["train", "validation"]
FORMAT = 1
BATCH_CHARACTERS = 1 << 19
LOG_SECONDS = 10.0
CHECKED_DOCUMENTS = 64
"""Documents of each split whose end is looked at when a store is opened."""
_MAX_TEXT = 1 << 20


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


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """A complete store. Holds no open file, so that it can be pickled."""

    folder: Path
    meta: StoreMeta

    @property
    def dtype(self) -> str:
        """Type of a token id."""
        return _dtype(self.meta.vocab_size)

    def tokens(self, split: Split) -> np.ndarray:
        return _map(self.folder / f"{split}.tokens", dtype=self.dtype)

    def offsets(self, split: Split) -> np.ndarray:
        return _map(self.folder / f"{split}.offsets", dtype="int64")


def _dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _map(path: Path, *, dtype: str) -> np.ndarray:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=dtype)
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def prepare_store(source: Source, *, tokenizer: Tokenizer, data: Data) -> TokenStore:
    """Returns the store of a source, and makes it first if it does not exist.

    Call it before process groups start: it can take long, and the other processes of the node wait for it. ConfigError
    if the source cannot be read, has no text, or has more than data.max_bad_rows bad rows.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(user_cache, "torchtitan_clone") if data.cache_folder is None else Path(data.cache_folder)
    work_dir = cache / "sources" / digest_of([source.name, str(source.root.resolve())])[:16]
    try:
        with _locked(work_dir, source=source):
            key = StoreKey(
                format=FORMAT,
                source_fingerprint=source_fingerprint(source, listing=work_dir / "files.json"),
                tokenizer_fingerprint=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                eos_id=tokenizer.eos_id,
                held_out_fraction=data.held_out_fraction,
            )
            folder = cache / "stores" / digest_of(asdict(key))[:16]
            shutil.rmtree(work_dir / "partial", ignore_errors=True)
            if not folder.exists():
                _make_store(source, tokenizer=tokenizer, data=data, key=key, folder=work_dir / "partial")
                _commit(work_dir / "partial", folder)
        store = _open_store(folder, key=key)
    except TokenizerProcessError as error:
        remedy = "correct the tokenizer (model.hf_assets_path), or lower data.prepare_processes if memory is short"
        raise ConfigError(f"{source.name} cannot be tokenized: {shorten(str(error))}; {remedy}.") from error
    except OSError as error:
        raise ConfigError(
            f"data.cache_folder = {toml_like(str(cache))}: preparing {source.name} there failed: {error}; set it to a "
            "folder that can be written, with enough space."
        ) from error
    _bad_rows(store.meta, limit=data.max_bad_rows).check()
    return store


def _bad_rows(meta: StoreMeta, *, limit: int) -> BadRows:
    return BadRows(limit=limit, count=meta.bad_rows, first=meta.first_bad_rows)


@contextmanager
def _locked(work_dir: Path, *, source: Source) -> Iterator[None]:
    """Holds the lock of a source; the kernel releases it even if this process is killed."""
    work_dir.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # does not wait at a pipe
    with os.fdopen(os.open(work_dir / "lock", flags, 0o666), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares %s", source.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_store(source: Source, *, tokenizer: Tokenizer, data: Data, key: StoreKey, folder: Path) -> None:
    folder.mkdir()
    start = time.perf_counter()
    write = partial(_write_splits, source, tokenizer=tokenizer, data=data, key=key, folder=folder)
    try:
        meta = write(held_out_fraction=data.held_out_fraction)
        if data.held_out_fraction and min(meta.documents.values()) == 0 and max(meta.documents.values()) > 1:
            # Too few documents for both splits to get some by chance: hold out the one with the lowest hash.
            documents = read_documents(source, bad_rows=BadRows(limit=data.max_bad_rows))
            meta = write(held_out_fraction=min(_hash(text) for text, _ in documents))
        if not meta.documents["train"]:  # there is only one document, or copies of one
            meta = write(held_out_fraction=0.0)
        if not meta.documents["train"]:
            reason = f"training data {source.name}: no text in {source.root}"
            raise ConfigError(f"{reason}; set training.dataset_path to text files.")
        write_atomically(folder / "meta.json", json.dumps(asdict(meta), indent=2).encode())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    found = f"{sum(meta.documents.values()):,} documents, {meta.tokens['train']:,} tokens, and "
    found += f"{meta.tokens['validation']:,} tokens held out"
    logger.info("prepared %s in %.1f s: %s", meta.source, time.perf_counter() - start, found)
    if meta.bad_rows:
        logger.warning("skipped %s", _bad_rows(meta, limit=data.max_bad_rows).report())


def _write_splits(
    source: Source, *, tokenizer: Tokenizer, data: Data, key: StoreKey, folder: Path, held_out_fraction: float
) -> StoreMeta:
    bad_rows = BadRows(limit=data.max_bad_rows)
    encoded = encode_batches(
        _batches(read_documents(source, bad_rows=bad_rows), held_out_fraction=held_out_fraction),
        tokenizer=tokenizer,
        dtype=_dtype(tokenizer.vocab_size),
        num_processes=data.prepare_processes if data.prepare_processes > 0 else len(os.sched_getaffinity(0)),
    )
    train = _SplitWriter(folder, "train")
    validation = _SplitWriter(folder, "validation")
    with closing(train), closing(validation), _progress(source) as report, closing(encoded):
        for (held_out, bytes_read), tokens, lengths in encoded:
            train.append(tokens[np.repeat(~held_out, lengths)], lengths[~held_out])
            validation.append(tokens[np.repeat(held_out, lengths)], lengths[held_out])
            report(bytes_read)
    return StoreMeta(
        **asdict(key),
        source=f"{source.name} ({source.root})",
        tokens={"train": train.tokens, "validation": validation.tokens},
        documents={"train": train.documents, "validation": validation.documents},
        bad_rows=bad_rows.count,
        first_bad_rows=bad_rows.first,
    )


def _batches(
    documents: Iterator[tuple[str, int]], *, held_out_fraction: float
) -> Iterator[tuple[list[str], tuple[np.ndarray, int]]]:
    """Yields texts for one process, which of them are held out, and the bytes of the source read so far."""
    while batch := list(_take_characters(documents, BATCH_CHARACTERS)):
        held_out = np.array([is_held_out(text, fraction=held_out_fraction) for text, _ in batch])
        yield [text for text, _ in batch], (held_out, batch[-1][1])


def _take_characters(documents: Iterator[tuple[str, int]], size: int) -> Iterator[tuple[str, int]]:
    while size > 0 and (document := next(documents, None)):
        size -= len(document[0])
        yield document


def is_held_out(text: str, *, fraction: float) -> bool:
    """Returns whether a document is for validation; depends on its text only, so copies are in the same split."""
    return fraction > 0 and _hash(text) <= fraction


def _hash(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


class _SplitWriter:
    def __init__(self, folder: Path, split: Split) -> None:
        self._tokens = (folder / f"{split}.tokens").open("wb")
        self._offsets = (folder / f"{split}.offsets").open("wb")
        self._offsets.write(np.zeros(1, dtype=np.int64).tobytes())
        self.tokens = 0
        self.documents = 0

    def append(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._tokens.write(tokens.tobytes())
        self._offsets.write((self.tokens + np.cumsum(lengths)).tobytes())
        self.tokens += len(tokens)
        self.documents += len(lengths)

    def close(self) -> None:
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())
            file.close()


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[int], None]]:
    """Yields a function that reports the bytes read so far: a progress bar on a terminal, else log messages."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in source.files)
    last_log = time.monotonic()

    def report(bytes_read: int) -> None:
        nonlocal last_log
        bar.update(bytes_read - bar.n)
        if bar.disable and time.monotonic() - last_log > LOG_SECONDS:
            last_log = time.monotonic()
            logger.info("preparing %s: %.0f %% of %.1f MB", source.name, 100 * bytes_read / total, total / 1e6)

    with tqdm(total=total, unit="B", unit_scale=True, desc=f"preparing {source.name}", disable=None) as bar:
        yield report


def _commit(prepared: Path, folder: Path) -> None:
    sync_folder(prepared)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        prepared.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(prepared)  # the same content, prepared at the same time from another path
    sync_folder(folder.parent)


def _open_store(folder: Path, *, key: StoreKey) -> TokenStore:
    """Opens the store of a key after comparing it with its files; ConfigError if they do not agree."""
    try:
        meta = _read_meta(folder / "meta.json")
        if changed := [name for name, value in asdict(key).items() if getattr(meta, name) != value]:
            raise DocumentError(f"meta.json: it is that of another store, with another {', '.join(changed)}")
        store = TokenStore(folder=folder, meta=meta)
        for split in get_args(Split):
            _check_size(folder / f"{split}.tokens", expected=meta.tokens[split] * np.dtype(store.dtype).itemsize)
            _check_size(folder / f"{split}.offsets", expected=(meta.documents[split] + 1) * 8)
            _check_documents(store, split)
    except (FileNotFoundError, DocumentError) as error:
        raise corrupt_store_error(folder, reason=str(error)) from error
    return store


def _read_meta(path: Path) -> StoreMeta:
    table = read_json(path).table(*(field.name for field in fields(StoreMeta)))
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
    )


def _counts(table: Value) -> dict[str, int]:
    return {split: count.integer() for split, count in table.table(*get_args(Split)).items()}


def _check_size(path: Path, *, expected: int) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise DocumentError(f"{path.name} has {size:,} bytes, not {expected:,}")


def _check_documents(store: TokenStore, split: Split) -> None:
    """Looks at the ends of some documents: offsets increase to the number of tokens, and eos is before each."""
    tokens, offsets = store.tokens(split), store.offsets(split)
    if offsets[0] != 0 or offsets[-1] != len(tokens):
        raise DocumentError(f"{split}.offsets does not reach from 0 to the number of tokens in {split}.tokens")
    chosen = np.linspace(0, len(offsets) - 1, min(len(offsets), CHECKED_DOCUMENTS)).astype(np.int64)[1:]
    starts, ends = offsets[chosen - 1], offsets[chosen]
    if not np.all((starts >= 0) & (starts < ends) & (ends <= len(tokens))):
        raise DocumentError(f"{split}.offsets does not increase")
    if not np.all(tokens[ends - 1] == store.meta.eos_id):
        raise DocumentError(f"{split}.tokens does not hold the documents of {split}.offsets")


def corrupt_store_error(folder: Path, *, reason: str) -> ConfigError:
    """Returns the error about a store whose files are not what was written."""
    return ConfigError(f"the token store {folder} is corrupt ({reason}); delete that folder to prepare it again.")
