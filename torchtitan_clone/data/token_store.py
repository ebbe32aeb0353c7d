"""Token stores: a source tokenized once to disk, then read by memory map.

    <cache>/stores/<key>/{train,validation}.tokens      token ids, eos after every document (uint16 or uint32)
                         {train,validation}.offsets     start of each document, and the end of the last (int64)
                         meta.json                      what the store was made from, and the size of each file
    <cache>/sources/<source>/lock, files.json, partial/   per source: lock, hashes of its files, store in progress

The key is a hash of everything that determines the content. A store is written to partial/ under the source's lock and
renamed into place after all of it is on disk, so that it is complete or does not exist. The next process removes what
an interrupted one left in partial/.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.config.schema import Data
from torchtitan_clone.data.encoder import encode_batches
from torchtitan_clone.data.fingerprint import digest_of, source_fingerprint
from torchtitan_clone.data.sources import BadRows, Source, read_documents
from torchtitan_clone.data.tokenizer import Tokenizer
from torchtitan_clone.files import sync_folder, write_atomically

logger = logging.getLogger("torchtitan_clone")

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

FORMAT = 1
BATCH_CHARACTERS = 1 << 19
"""Text that a tokenizer process gets at a time."""
LOG_SECONDS = 10.0
"""Time between two progress messages where there is no terminal."""


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

    def tokens(self, split: Split) -> np.ndarray:
        """Returns all token ids of a split, memory-mapped."""
        return _map(self.folder / f"{split}.tokens", dtype=_dtype(self.meta.vocab_size))

    def offsets(self, split: Split) -> np.ndarray:
        """Returns the start of each document in tokens(split), and the end of the last."""
        return _map(self.folder / f"{split}.offsets", dtype="int64")


def _dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _map(path: Path, *, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def prepare_store(source: Source, *, tokenizer: Tokenizer, data: Data) -> TokenStore:
    """Returns the store of a source, and makes it first if it does not exist.

    Call it before process groups start: it can take long, and the other processes of the node wait for it.
    ConfigError if the source cannot be read, has no text, or has more than data.max_bad_rows bad rows.
    """
    cache = cache_folder(data)
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
            partial = work_dir / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            if not folder.exists():
                _make_store(source, tokenizer=tokenizer, data=data, key=key, partial=partial)
                _commit(partial, folder)
        store = _open_store(folder)
    except OSError as error:
        raise ConfigError(
            f"data.cache_folder = {toml_like(str(cache))}: preparing {source.name} there failed: {error}; set it to a "
            "folder that can be written, with enough space."
        ) from error
    BadRows(limit=data.max_bad_rows, count=store.meta.bad_rows, first=store.meta.first_bad_rows).check()
    return store


def cache_folder(data: Data) -> Path:
    """Returns data.cache_folder, or torchtitan_clone in the user's cache folder."""
    if data.cache_folder is not None:
        return Path(data.cache_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan_clone"


@contextmanager
def _locked(work_dir: Path, *, source: Source) -> Iterator[None]:
    """Holds the lock of a source; the kernel releases it even if this process is killed."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with (work_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares %s", source.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_store(source: Source, *, tokenizer: Tokenizer, data: Data, key: StoreKey, partial: Path) -> None:
    partial.mkdir()
    start = time.perf_counter()
    bad_rows = BadRows(limit=data.max_bad_rows)
    try:
        writers = _write_splits(source, tokenizer=tokenizer, data=data, bad_rows=bad_rows, partial=partial)
        if data.held_out_fraction and not writers["validation"].documents and writers["train"].documents > 1:
            # Too few documents for one to be held out by chance: hold out the one with the lowest hash.
            data = replace(data, held_out_fraction=_lowest_hash(source, limit=data.max_bad_rows))
            bad_rows = BadRows(limit=data.max_bad_rows)
            writers = _write_splits(source, tokenizer=tokenizer, data=data, bad_rows=bad_rows, partial=partial)
        meta = StoreMeta(
            **asdict(key),
            source=f"{source.name} ({source.root})",
            tokens={split: writer.tokens for split, writer in writers.items()},
            documents={split: writer.documents for split, writer in writers.items()},
            bad_rows=bad_rows.count,
            first_bad_rows=bad_rows.first,
        )
        if not sum(meta.documents.values()):
            raise ConfigError(
                f"training data {source.name}: no text in {source.root}; set training.dataset_path to text files."
            )
        write_atomically(partial / "meta.json", json.dumps(asdict(meta), indent=2).encode())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _log_summary(meta, bad_rows=bad_rows, seconds=time.perf_counter() - start)


def _write_splits(
    source: Source, *, tokenizer: Tokenizer, data: Data, bad_rows: BadRows, partial: Path
) -> dict[Split, "_SplitWriter"]:
    """Tokenizes the source into the files of both splits, with at most a few batches in memory."""
    writers: dict[Split, _SplitWriter] = {split: _SplitWriter(partial, split) for split in SPLITS}
    encoded = encode_batches(
        _batches(source, bad_rows=bad_rows, held_out_fraction=data.held_out_fraction),
        tokenizer=tokenizer,
        dtype=_dtype(tokenizer.vocab_size),
        num_processes=data.prepare_processes if data.prepare_processes > 0 else len(os.sched_getaffinity(0)),
    )
    with _progress(source) as report, closing(encoded):
        for (held_out, bytes_read), tokens, lengths in encoded:
            for writer, chosen in ((writers["train"], ~held_out), (writers["validation"], held_out)):
                writer.append(tokens[np.repeat(chosen, lengths)], lengths[chosen])
            report(bytes_read)
    for writer in writers.values():
        writer.close()
    if not writers["train"].documents:  # all documents of a small source may be held out
        _exchange_splits(partial)
        writers = {"train": writers["validation"], "validation": writers["train"]}
    return writers


def _exchange_splits(partial: Path) -> None:
    for kind in ("tokens", "offsets"):
        (partial / f"train.{kind}").rename(partial / "exchange")
        (partial / f"validation.{kind}").rename(partial / f"train.{kind}")
        (partial / "exchange").rename(partial / f"validation.{kind}")


def _batches(
    source: Source, *, bad_rows: BadRows, held_out_fraction: float
) -> Iterator[tuple[list[str], tuple[np.ndarray, int]]]:
    """Yields texts for one tokenizer process, which of them are held out, and the bytes of the source read so far."""
    texts: list[str] = []
    held_out: list[bool] = []
    size = 0
    bytes_read = 0
    for text, bytes_read in read_documents(source, bad_rows=bad_rows):
        texts.append(text)
        held_out.append(is_held_out(text, fraction=held_out_fraction))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield texts, (np.array(held_out), bytes_read)
            texts = []
            held_out = []
            size = 0
    if texts:
        yield texts, (np.array(held_out), bytes_read)


def is_held_out(text: str, *, fraction: float) -> bool:
    """Returns whether a document is for validation; depends on its text only, so copies are in the same split."""
    return fraction > 0 and _hash(text) <= fraction


def _hash(text: str) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _lowest_hash(source: Source, *, limit: int) -> float:
    return min(_hash(text) for text, _ in read_documents(source, bad_rows=BadRows(limit=limit)))


class _SplitWriter:
    """Writes documents to the two files of a split."""

    def __init__(self, partial: Path, split: Split) -> None:
        self._tokens = (partial / f"{split}.tokens").open("wb")
        self._offsets = (partial / f"{split}.offsets").open("wb")
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
            _sync(file)
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


def _log_summary(meta: StoreMeta, *, bad_rows: BadRows, seconds: float) -> None:
    logger.info(
        "prepared %s in %.1f s: %s documents, %s tokens, and %s tokens held out",
        meta.source,
        seconds,
        f"{sum(meta.documents.values()):,}",
        f"{meta.tokens['train']:,}",
        f"{meta.tokens['validation']:,}",
    )
    if bad_rows.count:
        logger.warning("skipped %s", bad_rows.report())


def _commit(partial: Path, folder: Path) -> None:
    """Renames a complete store into place."""
    sync_folder(partial)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)  # the same content, prepared at the same time from another path
    sync_folder(folder.parent)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _open_store(folder: Path) -> TokenStore:
    try:
        meta = StoreMeta(**json.loads((folder / "meta.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise corrupt_store_error(folder, reason=f"meta.json: {error}") from error
    store = TokenStore(folder=folder, meta=meta)
    for split in SPLITS:
        _check_size(folder / f"{split}.tokens", items=meta.tokens[split], dtype=_dtype(meta.vocab_size))
        _check_size(folder / f"{split}.offsets", items=meta.documents[split] + 1, dtype="int64")
        if store.offsets(split)[-1] != meta.tokens[split]:
            raise corrupt_store_error(
                folder, reason=f"the last offset of {split}.offsets is not the size of {split}.tokens"
            )
    return store


def _check_size(path: Path, *, items: int, dtype: str) -> None:
    expected = items * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        raise corrupt_store_error(path.parent, reason=f"{path.name} has {size:,} bytes, not {expected:,}")


def corrupt_store_error(folder: Path, *, reason: str) -> ConfigError:
    """Returns the error about a store whose files are not what was written."""
    return ConfigError(f"the token store {folder} is corrupt ({reason}); delete that folder to prepare it again.")
