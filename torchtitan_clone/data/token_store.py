"""A source after tokenization, on disk: made once, then read by memory map.

    <cache>/stores/<key>/{train,validation}.tokens      token ids, eos after every document (uint16 or uint32)
                         {train,validation}.offsets     where each document starts, and the end of the last (int64)
                         meta.json                      what it was made from, and how large everything is
    <cache>/sources/<source>/lock, files.json, partial/   of one source: its lock, hashes of its files, store being made

The key is a hash of everything that decides the content. A store is made in partial/ under the source's lock and
renamed into place when all of it is on disk: it is whole or it does not exist, and whatever an interrupted process left
in partial/ is removed by the next one.
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
from typing import IO, Any, Literal

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Data
from torchtitan_clone.data.encoder import encode_batches
from torchtitan_clone.data.fingerprint import digest_of, source_fingerprint
from torchtitan_clone.data.sources import BadRows, Source, read_documents
from torchtitan_clone.data.tokenizer import Tokenizer

logger = logging.getLogger("torchtitan_clone")

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

FORMAT = 1
BATCH_CHARACTERS = 1 << 19  # of text that one tokenizer process gets at a time
LOG_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """meta.json. The first six fields decide the content and make the key."""

    format: int
    source_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    held_out_fraction: float
    source: str
    tokens: dict[str, int]
    documents: dict[str, int]
    bad_rows: int
    first_bad_rows: list[str]


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """A whole store. Holds no open file, so that it can be sent to another process."""

    folder: Path
    meta: StoreMeta

    def tokens(self, split: Split) -> np.ndarray:
        """All token ids of a split, as a view of the file."""
        return _map(self.folder / f"{split}.tokens", dtype=_dtype(self.meta.vocab_size))

    def offsets(self, split: Split) -> np.ndarray:
        """Where each document starts in tokens(split), and at last where they end."""
        return _map(self.folder / f"{split}.offsets", dtype="int64")


def _dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _map(path: Path, *, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def prepare_store(source: Source, *, tokenizer: Tokenizer, data: Data) -> TokenStore:
    """The store of this source, made now if it is not there.

    Call it before process groups start: it can take long, and all but one process of a node wait for it meanwhile.
    ConfigError where the source cannot be read, has no text or more than data.max_bad_rows bad rows.
    """
    cache = cache_folder(data)
    desk = cache / "sources" / digest_of([source.name, str(source.root.resolve())])[:16]
    try:
        with _locked(desk, source=source):
            contents = {
                "format": FORMAT,
                "source_fingerprint": source_fingerprint(source, listing=desk / "files.json"),
                "tokenizer_fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "held_out_fraction": data.held_out_fraction,
            }
            folder = cache / "stores" / digest_of(contents)[:16]
            shutil.rmtree(desk / "partial", ignore_errors=True)
            if not folder.exists():
                _make_store(source, tokenizer=tokenizer, data=data, contents=contents, partial=desk / "partial")
                _commit(desk / "partial", folder)
        store = _open_store(folder)
    except OSError as error:
        raise ConfigError(f"preparing {source.name} in data.cache_folder {cache}: {error}") from error
    BadRows(limit=data.max_bad_rows, count=store.meta.bad_rows, first=store.meta.first_bad_rows).check()
    return store


def cache_folder(data: Data) -> Path:
    """data.cache_folder, or torchtitan_clone below the user's cache."""
    if data.cache_folder is not None:
        return Path(data.cache_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan_clone"


@contextmanager
def _locked(desk: Path, *, source: Source) -> Iterator[None]:
    """Hold the source's lock; the kernel releases it however this process ends."""
    desk.mkdir(parents=True, exist_ok=True)
    with (desk / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process prepares %s: waiting for it", source.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_store(source: Source, *, tokenizer: Tokenizer, data: Data, contents: dict[str, Any], partial: Path) -> None:
    partial.mkdir()
    start = time.perf_counter()
    bad_rows = BadRows(limit=data.max_bad_rows)
    try:
        writers = _write_splits(source, tokenizer=tokenizer, data=data, bad_rows=bad_rows, partial=partial)
        if data.held_out_fraction and not writers["validation"].documents and writers["train"].documents > 1:
            # So few documents that none fell into the share: the one with the lowest hash is held out.
            data = replace(data, held_out_fraction=_lowest_hash(source, limit=data.max_bad_rows))
            bad_rows = BadRows(limit=data.max_bad_rows)
            writers = _write_splits(source, tokenizer=tokenizer, data=data, bad_rows=bad_rows, partial=partial)
        meta = StoreMeta(
            **contents,
            source=f"{source.name} ({source.root})",
            tokens={split: writer.tokens for split, writer in writers.items()},
            documents={split: writer.documents for split, writer in writers.items()},
            bad_rows=bad_rows.count,
            first_bad_rows=bad_rows.first,
        )
        if not sum(meta.documents.values()):
            raise ConfigError(f"training data {source.name}: there is no text in {source.root}")
        with (partial / "meta.json").open("w") as file:
            json.dump(asdict(meta), file, indent=2)
            _sync(file)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _log_summary(meta, bad_rows=bad_rows, seconds=time.perf_counter() - start)


def _write_splits(
    source: Source, *, tokenizer: Tokenizer, data: Data, bad_rows: BadRows, partial: Path
) -> dict[Split, "_SplitWriter"]:
    """Tokenize the source into the files of both splits, never holding more than a few batches of it."""
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
    if not writers["train"].documents:  # a small source may fall into the held-out share whole
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
    """Texts for one tokenizer process at a time; with them, which are held out, and bytes of the source read so far."""
    texts: list[str] = []
    held_out: list[bool] = []
    size = bytes_read = 0
    for text, bytes_read in read_documents(source, bad_rows=bad_rows):
        texts.append(text)
        held_out.append(is_held_out(text, fraction=held_out_fraction))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield texts, (np.array(held_out), bytes_read)
            texts, held_out, size = [], [], 0
    if texts:
        yield texts, (np.array(held_out), bytes_read)


def is_held_out(text: str, *, fraction: float) -> bool:
    """Whether this document is for validation: decided by its text alone, so the same wherever it is found again."""
    return fraction > 0 and _hash(text) <= fraction


def _hash(text: str) -> float:
    """Between 0 and 1, evenly."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _lowest_hash(source: Source, *, limit: int) -> float:
    return min(_hash(text) for text, _ in read_documents(source, bad_rows=BadRows(limit=limit)))


class _SplitWriter:
    """Appends documents to the two files of a split."""

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
    """A function to call with the bytes read so far: moves a bar on a terminal, else logs now and then."""
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
        logger.warning("left out %s", bad_rows.report())


def _commit(partial: Path, folder: Path) -> None:
    """Make a whole store visible under its name."""
    _sync_folder(partial)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)  # the same content, prepared at the same time from another path
    _sync_folder(folder.parent)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_store(folder: Path) -> TokenStore:
    try:
        meta = StoreMeta(**json.loads((folder / "meta.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise damaged_store(folder, reason=f"meta.json: {error}") from error
    store = TokenStore(folder=folder, meta=meta)
    for split in SPLITS:
        _check_size(folder / f"{split}.tokens", items=meta.tokens[split], dtype=_dtype(meta.vocab_size))
        _check_size(folder / f"{split}.offsets", items=meta.documents[split] + 1, dtype="int64")
        if store.offsets(split)[-1] != meta.tokens[split]:
            raise damaged_store(folder, reason=f"{split}.offsets ends elsewhere than {split}.tokens")
    return store


def _check_size(path: Path, *, items: int, dtype: str) -> None:
    expected = items * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        raise damaged_store(path.parent, reason=f"{path.name} has {size:,} bytes, not {expected:,}")


def damaged_store(folder: Path, *, reason: str) -> ConfigError:
    """The error about a store that no longer holds what was written."""
    return ConfigError(f"the token store {folder} is damaged ({reason}); delete that folder, and it is prepared again")
