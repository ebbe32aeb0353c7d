"""Makes token stores: a source is tokenized in parts, which are joined when all exist.

    <cache>/sources/<source>/lock, files.json    lock, and hashes of the source's files
                             partial/            what is being written
                             parts/<key>/        finished parts, each in the format of a store

Everything is written to partial/ under a lock, and renamed after all of it is on disk: a part or a store is complete or
does not exist. What is killed therefore continues after the last finished part.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from torchtitan_clone.cache_folders import user_cache_folder
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema_training import Data
from torchtitan_clone.data.encoder import TokenizerProcessError, encode_batches
from torchtitan_clone.data.formats import (
    TokenFiles,
    check_ids,
    has_token_rows,
    holds_tokens,
    named_validation,
    read_token_rows,
    warn_about_blocks,
)
from torchtitan_clone.data.kinds import kind_of
from torchtitan_clone.data.sources import (
    FIRST_BAD_ROWS,
    BadRows,
    Source,
    describe_empty,
    read_documents,
    recognized,
    source_fingerprint,
)
from torchtitan_clone.data.token_store import (
    COUNTS,
    FORMAT,
    PART_BYTES,
    SEGMENTS_FILE,
    Split,
    SplitWriter,
    StoreKey,
    StoreMeta,
    TokenStore,
    commit,
    content_of,
    digest_of,
    dtype_of_ids,
    has_one_document,
    locked,
    open_store,
    unit_hash,
    write_meta,
    write_segments,
)
from torchtitan_clone.data.tokenizer import Tokenizer
from torchtitan_clone.documents import shorten
from torchtitan_clone.files import write_atomically

if TYPE_CHECKING:
    pass

logger = logging.getLogger("torchtitan_clone")

BATCH_CHARACTERS = 1 << 19
LISTING_FILE = "files.json"
Report = Callable[[int], None]


def prepare_store(
    source: Source, *, tokenizer: Tokenizer, data: Data, part_bytes: int = PART_BYTES, report: Report = lambda _: None
) -> TokenStore:
    """Returns the store of a source, and makes it first if it does not exist.

    Call it before process groups start: it can take long, and the other processes of the node wait for it. ConfigError
    if the source cannot be read, has no text, or has more than data.max_bad_rows bad rows.
    """
    preparation = _Preparation(source=source, tokenizer=tokenizer, data=data, part_bytes=part_bytes, report=report)
    with _explained_errors(preparation):
        store = preparation.prepare()
    _bad_rows(store.meta, limit=data.max_bad_rows).check()
    return store


def prepare_parts(
    source: Source,
    *,
    tokenizer: Tokenizer,
    data: Data,
    task: int,
    tasks: int,
    part_bytes: int = PART_BYTES,
    report: Report = lambda _: None,
) -> bool:
    """Tokenizes every `tasks`-th part of a source; returns whether now all exist, so that prepare_store joins them.

    The tasks may run at the same time, on machines with a common cache folder. ConfigError as for prepare_store.
    """
    options = {"part_bytes": part_bytes, "report": report, "owner": f"-{task}-of-{tasks}"}
    preparation = _Preparation(source=source, tokenizer=tokenizer, data=data, **options)
    with _explained_errors(preparation):
        return preparation.prepare_parts(slice(task, None, tasks))


@contextmanager
def _explained_errors(preparation: "_Preparation") -> Iterator[None]:
    """Raises ConfigError for errors of the tokenizer and of the cache folder."""
    name = preparation.source.name
    try:
        yield
    except TokenizerProcessError as error:
        remedy = "correct the tokenizer (model.hf_assets_path), or lower data.prepare_processes if memory is short"
        raise ConfigError(f"{name} cannot be tokenized: {shorten(str(error))}; {remedy}.") from error
    except OSError as error:
        option = f"data.cache_folder = {toml_like(str(_cache_folder(preparation.data)))}"
        remedy = "set it to a folder that can be written, with enough space"
        raise ConfigError(f"{option}: preparing {name} there failed: {error}; {remedy}.") from error


def _cache_folder(data: Data) -> Path:
    return user_cache_folder() if data.cache_folder is None else Path(data.cache_folder)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Files that are tokenized together, and the store of their tokens."""

    source: Source
    bytes_before: int
    """Size of the parts before it."""
    key: StoreKey
    folder: Path
    has_ids: bool
    """Whether the source has token ids instead of text, which its first file says."""
    cuts_end: bool
    """Whether the end of its text is held out, instead of documents by their hash."""


@dataclass(frozen=True, kw_only=True)
class _Label:
    """What is known about a batch of documents before it is tokenized."""

    part: _Part
    held_out: np.ndarray
    """bool; by document."""
    text_bytes: np.ndarray
    """int64; by document, 0 of token ids."""
    bytes_read: int
    """Of the part."""
    bad_rows: BadRows
    """Of the part, complete with its last batch."""


_Document = str | np.ndarray
"""Text, or the token ids of a parquet file."""
_LabelledDocument = tuple[_Document, int, bool, int]
"""With the bytes of the source read so far, whether it is held out, and the bytes of its text, 0 of token ids."""
_Encoded = tuple[_Label, np.ndarray, np.ndarray]
"""A batch, its tokens and the length of each document."""


@dataclass(kw_only=True)
class _Preparation:
    """The making of a source's store, or by one of several tasks, the owner, of some of its parts."""

    source: Source
    tokenizer: Tokenizer
    data: Data
    part_bytes: int
    report: Report
    """Is called with the bytes of the source that were read so far."""
    owner: str = ""
    _used_parts: list[_Part] = field(default_factory=list, init=False)
    """Those of a store that was made, which are removed then."""

    @property
    def _work_dir(self) -> Path:
        identity = digest_of([self.source.name, str(self.source.root.resolve())])[:16]
        return _cache_folder(self.data) / "sources" / identity

    def _find_store(self) -> tuple[StoreKey, Path]:
        """Returns key and folder of the store, after reading the files that have changed."""
        listing = self._work_dir / LISTING_FILE
        # Tasks, each of which has a lock of its own, leave the listing to who joins the parts.
        updates = not self.owner and _can_write(self._work_dir)
        fingerprint = source_fingerprint(self.source, listing=listing, updates=updates)
        if _held_out_files(self.source):
            fingerprint = digest_of([fingerprint, "held out by name"])
        elif self._cuts_end:
            fingerprint = digest_of([fingerprint, "held out at the end"])
        key = self._key(fingerprint)
        if key.held_out_fraction and has_one_document(self._store_folder(key)):
            # An older version held out nothing of a row or a document of ids that is the only one.
            key = self._key(digest_of([fingerprint, "held out at the end"]))
        return key, self._store_folder(key)

    def _store_folder(self, key: StoreKey) -> Path:
        return _cache_folder(self.data) / "stores" / digest_of(asdict(key))[:16]

    @property
    def _cuts_end(self) -> bool:
        """Whether the source is one text: its blocks are too few, and too large, to be chosen by hash."""
        files = self.source.files
        is_text = len(files) == 1 and kind_of(files[0], text_key=self.source.text_key).content in ("text", "json")
        return is_text and self.data.held_out_fraction > 0

    @property
    def _partial(self) -> Path:
        return self._work_dir / f"partial{self.owner}"

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Holds the lock, and removes what is incomplete in the end, as after a killed process."""
        with locked(self._work_dir / f"lock{self.owner}", name=self.source.name):
            try:
                shutil.rmtree(self._partial, ignore_errors=True)
                yield
            finally:
                shutil.rmtree(self._partial, ignore_errors=True)

    def prepare(self) -> TokenStore:
        """Returns the store, and makes it first if it does not exist."""
        can_write = not self._work_dir.exists() or _can_write(self._work_dir)
        with self._working() if can_write else nullcontext():  # others may have made the store
            key, folder = self._find_store()
            if not folder.exists():
                start = time.perf_counter()
                meta = self._index(key) if holds_tokens(self.source.files) else self._tokenize(key)
                commit(self._partial, folder)
                for part in self._used_parts:  # not those of another preparation
                    shutil.rmtree(part.folder, ignore_errors=True)
                _report(meta, seconds=time.perf_counter() - start, limit=self.data.max_bad_rows)
            store = open_store(folder, key=key, files=self.source.files, packing=self.data.packing)
        if not store.meta.text_bytes and not self.tokenizer.is_byte_level:
            place = f"{self.source.name} was prepared before the bytes of its text were counted"
            logger.warning("%s: its bits per byte are estimates; delete %s to prepare it again", place, folder)
        return store

    def prepare_parts(self, chosen: slice) -> bool:
        """Makes some of the parts; returns whether now all exist."""
        if holds_tokens(self.source.files):
            return True  # no parts: they are read in place
        with self._working():
            # Without the list of hashes, each task would read the corpus to look for the store.
            if (self._work_dir / LISTING_FILE).exists() and self._find_store()[1].exists():
                return True  # the parts are gone
            parts = self._parts(self.data.held_out_fraction, cuts_end=self._cuts_end)
            self._make_parts(parts[chosen])
        return all(part.folder.exists() for part in parts)

    def _key(self, fingerprint: str) -> StoreKey:
        return StoreKey(
            format=FORMAT,
            source_fingerprint=fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            held_out_fraction=self.data.held_out_fraction,
        )

    def _index(self, key: StoreKey) -> StoreMeta:
        """Writes where the tokens of files are that are read in place."""
        source = self.source
        files = TokenFiles(
            files=source.files, root=source.root, column=source.text_key, vocab_size=key.vocab_size, eos_id=key.eos_id
        )
        index = files.index(held_out_fraction=key.held_out_fraction)
        self._partial.mkdir()
        for split, of_split in index.items():
            write_atomically(self._partial / f"{split}.offsets", of_split.offsets.tobytes())
            write_atomically(self._partial / f"{split}.added", of_split.added.tobytes())
        segments = {split: of_split.segments for split, of_split in index.items()}
        write_segments(self._partial / SEGMENTS_FILE, segments)
        counts: dict[str, dict[str, int]] = {name: dict.fromkeys(get_args(Split), 0) for name in COUNTS}
        counts["tokens"] = {split: int(of_split.offsets[-1]) for split, of_split in index.items()}
        counts["documents"] = {split: len(of_split.offsets) - 1 for split, of_split in index.items()}
        return self._write_meta(key, counts=counts, bad_rows=BadRows(limit=0))

    def _write_meta(self, key: StoreKey, *, counts: Mapping[str, dict[str, int]], bad_rows: BadRows) -> StoreMeta:
        name = f"{self.source.name} ({self.source.root})"
        skipped = {"bad_rows": bad_rows.count, "first_bad_rows": bad_rows.first}
        meta = StoreMeta(**asdict(key), source=name, **counts, **skipped)
        write_meta(meta, folder=self._partial)
        return meta

    def _tokenize(self, key: StoreKey) -> StoreMeta:
        """Makes the parts that do not exist, and joins all."""
        fraction = self.data.held_out_fraction
        stores = self._all_parts(fraction, cuts_end=self._cuts_end)
        documents = _total(stores, "documents")
        if fraction and sum(documents.values()) == 1:
            stores = self._all_parts(fraction, cuts_end=True)
        elif fraction and min(documents.values()) == 0 and max(documents.values()) > 1:
            # Too few documents for both splits to get some by chance: hold out the one with the lowest hash.
            documents_again = _documents(
                self.source, has_ids=_has_ids(self.source), bad_rows=BadRows(limit=self.data.max_bad_rows)
            )
            stores = self._all_parts(min(unit_hash(content_of(document)) for document, _ in documents_again))
        if not _total(stores, "documents")["train"]:  # copies of one document, or one of one character
            stores = self._all_parts(0.0)
        if not _total(stores, "documents")["train"]:
            raise ConfigError(f"training data {describe_empty(self.source)}; set training.dataset_path to text files.")
        return self._join(stores, key=key)

    def _join(self, stores: Sequence[TokenStore], *, key: StoreKey) -> StoreMeta:
        self._partial.mkdir()
        for split in get_args(Split):
            with closing(SplitWriter(self._partial, split)) as writer:
                for store in stores:
                    writer.append(np.asarray(store.tokens(split)), np.diff(store.offsets(split)))
        first = [place for store in stores for place in store.meta.first_bad_rows][:FIRST_BAD_ROWS]
        count = sum(store.meta.bad_rows for store in stores)
        counts = {name: _total(stores, name) for name in COUNTS}
        return self._write_meta(key, counts=counts, bad_rows=BadRows(limit=count, count=count, first=first))

    def _all_parts(self, held_out_fraction: float, *, cuts_end: bool = False) -> list[TokenStore]:
        parts = self._parts(held_out_fraction, cuts_end=cuts_end)
        self._used_parts.extend(parts)
        self._make_parts(parts)
        return [open_store(part.folder, key=part.key) for part in parts]

    def _parts(self, held_out_fraction: float, *, cuts_end: bool) -> list[_Part]:
        """Divides the files in their order; a part is identified by names, sizes and times, without reading it."""
        parts: list[_Part] = []
        files: list[Path] = []
        entries: list[tuple[str, int, int]] = []
        before = size = 0
        held_out, has_ids = _held_out_files(self.source), _has_ids(self.source)
        for file, following in zip_longest(self.source.files, self.source.files[1:]):
            status = file.stat()
            files.append(file)
            entries.append((file.relative_to(self.source.root).as_posix(), status.st_size, status.st_mtime_ns))
            size += status.st_size
            if size >= self.part_bytes or following is None or (file in held_out) != (following in held_out):
                source = replace(self.source, files=tuple(files))
                variant = [*recognized(source), *(["held out at the end"] if cuts_end else [])]
                key = self._key(digest_of([entries, self.source.text_key, *variant]))
                key = replace(key, held_out_fraction=float(file in held_out) if held_out else held_out_fraction)
                folder = self._work_dir / "parts" / digest_of(asdict(key))[:16]
                kind = {"has_ids": has_ids, "cuts_end": cuts_end}
                parts.append(_Part(source=source, bytes_before=before, key=key, folder=folder, **kind))
                files, entries, before, size = [], [], before + size, 0
        return parts

    def _make_parts(self, parts: Sequence[_Part]) -> None:
        """Tokenizes the parts that do not exist, in order."""
        missing = [part for part in parts if not part.folder.exists()]
        if not missing:
            return
        if len(missing) < len(parts):
            logger.info("preparing %s: %d of %d parts exist", self.source.name, len(parts) - len(missing), len(parts))
        sizes_V = np.array(self.tokenizer.byte_lengths())
        batches = (batch for part in missing for batch in _batches(part, limit=self.data.max_bad_rows))
        with closing(_encode(batches, preparation=self)) as encoded:
            for part, batches_of_part in groupby(encoded, key=lambda batch: batch[0].part):
                self._write_part(part, batches_of_part, sizes_V=sizes_V)

    def _write_part(self, part: _Part, batches: Iterator[_Encoded], *, sizes_V: np.ndarray) -> None:
        self._partial.mkdir()
        writers = {split: SplitWriter(self._partial, split) for split in get_args(Split)}
        bad_rows = BadRows(limit=0)
        with closing(writers["train"]), closing(writers["validation"]):
            for label, tokens, lengths in batches:
                for split, chosen in (("train", ~label.held_out), ("validation", label.held_out)):
                    of_split = tokens[np.repeat(chosen, lengths)]
                    sizes = {"text_bytes": label.text_bytes[chosen].sum(), "token_bytes": sizes_V[of_split].sum()}
                    writers[split].append(of_split, lengths[chosen], **sizes)
                self.report(part.bytes_before + label.bytes_read)
                bad_rows = label.bad_rows
        counts = {name: {split: getattr(writer, name) for split, writer in writers.items()} for name in COUNTS}
        self._write_meta(part.key, counts=counts, bad_rows=bad_rows)
        commit(self._partial, part.folder)


def _can_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=True)


def _held_out_files(source: Source) -> set[Path]:
    """Returns the files of token rows that are held out as a whole, instead of documents by their hash."""
    return named_validation(source.files, root=source.root) if _has_ids(source) else set()


def _has_ids(source: Source) -> bool:
    return has_token_rows(source.files, column=source.text_key)


def _encode(
    batches: Iterator[tuple[list[Any], _Label]], *, preparation: _Preparation
) -> Generator[_Encoded, None, None]:
    tokenizer, source = preparation.tokenizer, preparation.source
    dtype = dtype_of_ids(tokenizer.vocab_size)
    if _has_ids(source):
        return _join_ids(batches, tokenizer=tokenizer, dtype=dtype, root=source.root)
    wanted = preparation.data.prepare_processes
    num_processes = wanted if wanted > 0 else len(os.sched_getaffinity(0))
    return encode_batches(batches, tokenizer=tokenizer, dtype=dtype, num_processes=num_processes)


def _join_ids(
    batches: Iterator[tuple[list[np.ndarray], _Label]], *, tokenizer: Tokenizer, dtype: str, root: Path
) -> Generator[_Encoded, None, None]:
    """Ends documents of token ids with the end-of-text token where they do not."""
    stored: list[np.ndarray] = []
    without_eos = 0
    for documents, label in batches:
        complete = [ids if ids[-1] == tokenizer.eos_id else np.append(ids, tokenizer.eos_id) for ids in documents]
        lengths = np.array([len(ids) for ids in complete], dtype=np.int64)
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *complete])
        check_ids(tokens, vocab_size=tokenizer.vocab_size, path=root)
        stored.append(np.array([len(ids) for ids in documents], dtype=np.int64))
        without_eos += int((lengths - stored[-1]).sum())
        yield label, tokens.astype(dtype), lengths
    warn_about_blocks(np.concatenate([np.empty(0, dtype=np.int64), *stored]), without_eos=without_eos, path=root)


def _report(meta: StoreMeta, *, seconds: float, limit: int) -> None:
    sizes = f"{sum(meta.documents.values()):,} documents, {meta.tokens['train']:,} tokens, and "
    sizes += f"{meta.tokens['validation']:,} tokens held out"
    logger.info("prepared %s in %.1f s: %s", meta.source, seconds, sizes)
    if meta.bad_rows:
        logger.warning("skipped %s", _bad_rows(meta, limit=limit).report())


def _total(stores: Sequence[TokenStore], name: str) -> dict[str, int]:
    """Returns the sums of a count by split; none if one of the stores, made by an older version, has not counted."""
    counts = [getattr(store.meta, name) for store in stores]
    return {split: sum(count[split] for count in counts) for split in get_args(Split)} if all(counts) else {}


def _bad_rows(meta: StoreMeta, *, limit: int) -> BadRows:
    return BadRows(limit=limit, count=meta.bad_rows, first=meta.first_bad_rows)


def _documents(source: Source, *, has_ids: bool, bad_rows: BadRows) -> Iterator[tuple[_Document, int]]:
    """Yields every document, with the number of bytes of the source read so far."""
    if has_ids:
        return read_token_rows(source.files, column=source.text_key)
    return read_documents(source, bad_rows=bad_rows)


def _batches(part: _Part, *, limit: int) -> Iterator[tuple[list[Any], _Label]]:
    """Yields documents for one process and their label; the last batch of a part is empty."""
    bad_rows = BadRows(limit=limit)
    documents = (_cut_end if part.cuts_end else _choose_by_hash)(part, bad_rows=bad_rows)
    bytes_read = 0
    while True:
        batch = list(_take_characters(documents, BATCH_CHARACTERS))
        held_out = np.array([is_validation for _, _, is_validation, _ in batch], dtype=bool)
        text_bytes = np.array([size for *_, size in batch], dtype=np.int64)
        bytes_read = batch[-1][1] if batch else bytes_read
        label = _Label(part=part, held_out=held_out, text_bytes=text_bytes, bytes_read=bytes_read, bad_rows=bad_rows)
        yield [document for document, *_ in batch], label
        if not batch:
            return


def _choose_by_hash(part: _Part, *, bad_rows: BadRows) -> Iterator[_LabelledDocument]:
    fraction = part.key.held_out_fraction
    for document, bytes_read in _documents(part.source, has_ids=part.has_ids, bad_rows=bad_rows):
        content = content_of(document)
        is_validation = fraction > 0 and unit_hash(content) <= fraction
        yield document, bytes_read, is_validation, 0 if part.has_ids else len(content)


def _cut_end(part: _Part, *, bad_rows: BadRows) -> Iterator[_LabelledDocument]:
    """Holds out the end of all documents together, of which one is cut, at a line end if it has one before."""
    counted = _documents(part.source, has_ids=part.has_ids, bad_rows=BadRows(limit=bad_rows.limit))
    total = sum(len(document) for document, _ in counted)
    left = total - math.ceil(total * part.key.held_out_fraction)
    for document, bytes_read in _documents(part.source, has_ids=part.has_ids, bad_rows=bad_rows):
        cut = min(len(document), max(0, left))
        left -= len(document)
        if isinstance(document, str) and 0 < cut < len(document):
            cut = document.rfind("\n", 0, cut) + 1 or cut
        for half, is_validation in ((document[:cut], False), (document[cut:], True)):
            if len(half):
                yield half, bytes_read, is_validation, 0 if part.has_ids else len(content_of(half))


def _take_characters(documents: Iterator[_LabelledDocument], size: int) -> Iterator[_LabelledDocument]:
    while size > 0 and (document := next(documents, None)):
        size -= len(document[0])
        yield document
