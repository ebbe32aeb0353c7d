"""Makes token stores: a source is tokenized in parts, which are joined when all exist.

    <cache>/sources/<source>/lock, files.json    lock, and hashes of the source's files
                             partial/            what is being written
                             parts/<key>/        finished parts, each in the format of a store

Everything is written to partial/ under a lock, and renamed after all of it is on disk: a part or a store is complete or
does not exist. What is killed therefore continues after the last finished part.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, get_args

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema_training import Data
from torchtitan_clone.data.best_fit import packing_name
from torchtitan_clone.data.encoder import TokenizerProcessError, TokenizerProcesses, encode_batches
from torchtitan_clone.data.formats import (
    TokenFiles,
    check_ids,
    has_token_rows,
    holds_tokens,
    named_validation,
    warn_about_blocks,
)
from torchtitan_clone.data.kinds import kind_of
from torchtitan_clone.data.marks import ids_of
from torchtitan_clone.data.reports import report_prepared, skipped_rows
from torchtitan_clone.data.sources import (
    FIRST_BAD_ROWS,
    BadRows,
    Source,
    describe_empty,
    reading_of,
    source_fingerprint,
)
from torchtitan_clone.data.splits import Label, Part, documents_of, read_batches
from torchtitan_clone.data.token_store import (
    COUNTS,
    PART_BYTES,
    SEGMENTS_FILE,
    Split,
    SplitWriter,
    StoreKey,
    StoreMeta,
    TokenStore,
    cache_folder,
    commit,
    content_of,
    digest_of,
    dtype_of_ids,
    has_one_document,
    key_of,
    locked,
    open_store,
    total,
    unit_hash,
    write_meta,
    write_segments,
)
from torchtitan_clone.data.tokenizer import Tokenizer
from torchtitan_clone.documents import shorten
from torchtitan_clone.files import write_atomically

logger = logging.getLogger("torchtitan_clone")

LISTING_FILE = "files.json"
Report = Callable[[int], None]


def tokenizer_processes(data: Data) -> TokenizerProcesses:
    """Returns the processes that tokenize sources, as many as data.prepare_processes says."""
    wanted = data.prepare_processes
    return TokenizerProcesses(wanted if wanted > 0 else len(os.sched_getaffinity(0)))


def prepare_store(
    source: Source,
    *,
    tokenizer: Tokenizer,
    data: Data,
    processes: TokenizerProcesses,
    part_bytes: int = PART_BYTES,
    report: Report = lambda _: None,
) -> TokenStore:
    """Returns the store of a source, and makes it first if it does not exist.

    Call it before process groups start: it can take long, and the other processes of the node wait for it. ConfigError
    if the source cannot be read, has no text, or has more than data.max_bad_rows bad rows.
    """
    source = _with_renderer(source, tokenizer=tokenizer)
    options = {"processes": processes, "part_bytes": part_bytes, "report": report}
    preparation = _Preparation(source=source, tokenizer=tokenizer, data=data, **options)
    with _explained_errors(preparation):
        store = preparation.prepare()
    skipped_rows(store.meta, limit=data.max_bad_rows).check()
    return store


def prepare_parts(
    source: Source,
    *,
    tokenizer: Tokenizer,
    data: Data,
    processes: TokenizerProcesses,
    task: int,
    tasks: int,
    part_bytes: int = PART_BYTES,
    report: Report = lambda _: None,
) -> bool:
    """Tokenizes every `tasks`-th part of a source; returns whether now all exist, so that prepare_store joins them.

    The tasks may run at the same time, on machines with a common cache folder. ConfigError as for prepare_store.
    """
    source = _with_renderer(source, tokenizer=tokenizer)
    options = {"processes": processes, "part_bytes": part_bytes, "report": report, "owner": f"-{task}-of-{tasks}"}
    preparation = _Preparation(source=source, tokenizer=tokenizer, data=data, **options)
    with _explained_errors(preparation):
        return preparation.prepare_parts(slice(task, None, tasks))


def _with_renderer(source: Source, *, tokenizer: Tokenizer) -> Source:
    """Returns a source of chats with their renderer; ConfigError if the tokenizer has no chat template."""
    if source.chat is None:
        return source
    from torchtitan_clone.data.chat import renderer_of

    return replace(source, renderer=renderer_of(source.chat, tokenizer=tokenizer))


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
        option = f"data.cache_folder = {toml_like(str(cache_folder(preparation.data)))}"
        remedy = "set it to a folder that can be written, with enough space"
        raise ConfigError(f"{option}: preparing {name} there failed: {error}; {remedy}.") from error


_Encoded = tuple[Label, np.ndarray, np.ndarray, np.ndarray]
"""A batch, its tokens, and by document the length and the special tokens that it spells out."""


@dataclass(kw_only=True)
class _Preparation:
    """The making of a source's store, or by one of several tasks, the owner, of some of its parts."""

    source: Source
    tokenizer: Tokenizer
    data: Data
    processes: TokenizerProcesses
    part_bytes: int
    report: Report
    """Is called with the bytes of the source that were read so far."""
    owner: str = ""
    _used_parts: list[Part] = field(default_factory=list, init=False)
    """Those of a store that was made, which are removed then."""

    @property
    def _work_dir(self) -> Path:
        identity = digest_of([self.source.name, str(self.source.root.resolve())])[:16]
        return cache_folder(self.data) / "sources" / identity

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
        if key.held_out_fraction and self.source.chat is None and has_one_document(self._store_folder(key)):
            # An older version held out nothing of a row or a document of ids that is the only one.
            key = self._key(digest_of([fingerprint, "held out at the end"]))
        return key, self._store_folder(key)

    def _store_folder(self, key: StoreKey) -> Path:
        return cache_folder(self.data) / "stores" / digest_of(asdict(key))[:16]

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
            start, is_new = time.perf_counter(), not folder.exists()
            if is_new:
                make = self._index if holds_tokens(self.source.files) else self._tokenize
                make(key)
                commit(self._partial, folder)
                for part in self._used_parts:  # not those of another preparation
                    shutil.rmtree(part.folder, ignore_errors=True)
            chat = self.source.chat
            packing = packing_name(self.data.packing, long_chats=None if chat is None else chat.long_chats)
            store = open_store(folder, key=key, files=self.source.files, packing=packing)
            if is_new:
                seconds = time.perf_counter() - start
                report_prepared(self.source, store=store, seconds=seconds, limit=self.data.max_bad_rows)
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
        return key_of(fingerprint, tokenizer=self.tokenizer, held_out_fraction=self.data.held_out_fraction)

    def _index(self, key: StoreKey) -> None:
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
        self._write_meta(key, counts=counts, bad_rows=BadRows(limit=0))

    def _write_meta(
        self, key: StoreKey, *, counts: Mapping[str, dict[str, int]], bad_rows: BadRows,
        writers: Mapping[Split, SplitWriter] | None = None,
    ) -> None:  # fmt: skip
        name = f"{self.source.name} ({self.source.root})"
        skipped = {"bad_rows": bad_rows.count, "first_bad_rows": bad_rows.first}
        meta = StoreMeta(**asdict(key), source=name, **counts, **skipped)
        if writers and self.source.chat is not None:
            marks = {split: writer.marks for split, writer in writers.items()}
            targets = {split: writer.targets for split, writer in writers.items()}
            meta = replace(meta, marks=marks, targets=targets, without_targets=bad_rows.without_targets)
        write_meta(meta, folder=self._partial)

    def _tokenize(self, key: StoreKey) -> None:
        """Makes the parts that do not exist, and joins all."""
        fraction = self.data.held_out_fraction
        stores = self._all_parts(fraction, cuts_end=self._cuts_end)
        documents = total(stores, "documents")
        if fraction and sum(documents.values()) == 1 and self.source.chat is None:
            stores = self._all_parts(fraction, cuts_end=True)
        elif fraction and min(documents.values()) == 0 and max(documents.values()) > 1:
            # Too few documents for both splits to get some by chance: hold out the one with the lowest hash.
            documents_again = documents_of(
                self.source, has_ids=_has_ids(self.source), bad_rows=BadRows(limit=self.data.max_bad_rows)
            )
            stores = self._all_parts(min(unit_hash(content_of(document)) for document, _ in documents_again))
        if not total(stores, "documents")["train"]:  # copies of one document, or one of one character
            stores = self._all_parts(0.0)
        if not total(stores, "documents")["train"]:
            files = "text files" if self.source.chat is None else "other chats"
            raise ConfigError(f"training data {describe_empty(self.source)}; set training.dataset_path to {files}.")
        self._join(stores, key=key)

    def _join(self, stores: Sequence[TokenStore], *, key: StoreKey) -> None:
        self._partial.mkdir()
        writers: dict[Split, SplitWriter] = {}
        for split in get_args(Split):
            with closing(self._writer(split)) as writer:
                for store in stores:
                    writer.append(np.asarray(store.tokens(split)[:]), np.diff(store.offsets(split)))
            writers[split] = writer
        first = [place for store in stores for place in store.meta.first_bad_rows][:FIRST_BAD_ROWS]
        count = sum(store.meta.bad_rows for store in stores)
        counts = {name: total(stores, name) for name in COUNTS}
        without_targets = sum(store.meta.without_targets for store in stores)
        bad_rows = BadRows(limit=count, count=count, first=first, without_targets=without_targets)
        self._write_meta(key, counts=counts, bad_rows=bad_rows, writers=writers)

    def _writer(self, split: Split) -> SplitWriter:
        is_chat = self.source.chat is not None
        return SplitWriter(self._partial, split, dtype=dtype_of_ids(self.tokenizer.vocab_size) if is_chat else None)

    def _all_parts(self, held_out_fraction: float, *, cuts_end: bool = False) -> list[TokenStore]:
        parts = self._parts(held_out_fraction, cuts_end=cuts_end)
        self._used_parts.extend(parts)
        self._make_parts(parts)
        return [open_store(part.folder, key=part.key) for part in parts]

    def _parts(self, held_out_fraction: float, *, cuts_end: bool) -> list[Part]:
        """Divides the files in their order; a part is identified by names, sizes and times, without reading it."""
        parts: list[Part] = []
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
                variant = [*reading_of(source), *(["held out at the end"] if cuts_end else [])]
                key = self._key(digest_of([entries, self.source.text_key, *variant]))
                key = replace(key, held_out_fraction=float(file in held_out) if held_out else held_out_fraction)
                folder = self._work_dir / "parts" / digest_of(asdict(key))[:16]
                kind = {"has_ids": has_ids, "cuts_end": cuts_end}
                parts.append(Part(source=source, bytes_before=before, key=key, folder=folder, **kind))
                files, entries, before, size = [], [], before + size, 0
        return parts

    def _make_parts(self, parts: Sequence[Part]) -> None:
        """Tokenizes the parts that do not exist, in order."""
        missing = [part for part in parts if not part.folder.exists()]
        if not missing:
            return
        if len(missing) < len(parts):
            logger.info("preparing %s: %d of %d parts exist", self.source.name, len(parts) - len(missing), len(parts))
        sizes_V = np.array(self.tokenizer.byte_lengths())
        batches = (batch for part in missing for batch in read_batches(part, limit=self.data.max_bad_rows))
        with closing(_encode(batches, preparation=self)) as encoded:
            for part, batches_of_part in groupby(encoded, key=lambda batch: batch[0].part):
                self._write_part(part, batches_of_part, sizes_V=sizes_V)

    def _write_part(self, part: Part, batches: Iterator[_Encoded], *, sizes_V: np.ndarray) -> None:
        self._partial.mkdir()
        writers = {split: self._writer(split) for split in get_args(Split)}
        bad_rows = BadRows(limit=0)
        with closing(writers["train"]), closing(writers["validation"]):
            for label, tokens, lengths, spelled in batches:
                for split, chosen in (("train", ~label.held_out), ("validation", label.held_out)):
                    of_split = tokens[np.repeat(chosen, lengths)]
                    counts = {"text_bytes": label.text_bytes[chosen].sum(), "special_tokens": spelled[chosen].sum()}
                    token_bytes = sizes_V[ids_of(of_split)].sum()
                    writers[split].append(of_split, lengths[chosen], token_bytes=token_bytes, **counts)
                self.report(part.bytes_before + label.bytes_read)
                bad_rows = label.bad_rows
        counts = {name: {split: getattr(writer, name) for split, writer in writers.items()} for name in COUNTS}
        self._write_meta(part.key, counts=counts, bad_rows=bad_rows, writers=writers)
        commit(self._partial, part.folder)


def _can_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=True)


def _held_out_files(source: Source) -> set[Path]:
    """Returns the files of token rows that are held out as a whole, instead of documents by their hash."""
    return named_validation(source.files, root=source.root) if _has_ids(source) else set()


def _has_ids(source: Source) -> bool:
    return source.chat is None and has_token_rows(source.files, column=source.text_key)


def _encode(
    batches: Iterator[tuple[list[Any], Label]], *, preparation: _Preparation
) -> Generator[_Encoded, None, None]:
    tokenizer, source = preparation.tokenizer, preparation.source
    dtype = dtype_of_ids(tokenizer.vocab_size)
    if _has_ids(source):
        return _join_ids(batches, tokenizer=tokenizer, dtype=dtype, root=source.root)
    if source.chat is not None:  # those of the chat template
        tokenizer = tokenizer.parsing_special_tokens(option='training.format = "chat"')
    elif source.parse_special_tokens:
        tokenizer = tokenizer.parsing_special_tokens()
    return encode_batches(batches, tokenizer=tokenizer, dtype=dtype, processes=preparation.processes)


def _join_ids(
    batches: Iterator[tuple[list[np.ndarray], Label]], *, tokenizer: Tokenizer, dtype: str, root: Path
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
        yield label, tokens.astype(dtype), lengths, np.zeros_like(lengths)
    warn_about_blocks(np.concatenate([np.empty(0, dtype=np.int64), *stored]), without_eos=without_eos, path=root)
