"""Reads text from files, one document at a time.

A *source* is a list of files below one root. A *document* is a row of a .jsonl or .parquet file, or a text file (a long
one is split at line ends), see kinds. A *bad row* cannot be read: it is skipped, and more than data.max_bad_rows are an
error.
Files are not trusted: only regular ones are opened, and lines and compressed data are read in blocks of bounded size.
"""

import hashlib
import io
import json
import logging
import os
import stat
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import describe_empty_path
from torchtitan_clone.config.downloads import describe_download, find_downloaded
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.resolved import HUB_DATASETS
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.config.urls import local_path
from torchtitan_clone.data.formats import has_token_rows, holds_tokens, select_token_files, with_companions
from torchtitan_clone.data.kinds import (
    ERRORS,
    LINE_BYTES,
    decompressed,
    describe_conversation,
    kind_of,
    list_names,
    select_readable,
)
from torchtitan_clone.data.marks import ChatOptions, RowRenderer
from torchtitan_clone.data.token_store import digest_of
from torchtitan_clone.documents import DocumentError, open_regular, read_json, shorten
from torchtitan_clone.files import write_atomically

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger("torchtitan_clone")

T = TypeVar("T")
R = TypeVar("R")
_Entry = tuple[int, int, str]
"""Size in bytes, time of last modification in ns, sha256."""

BLOCK_BYTES = 1 << 20
"""A longer text file becomes several documents, so that it is never in memory as one."""
DOCUMENT_BYTES = 1 << 24
"""A longer text is a bad row: tokenizing one takes about 130 times its memory in one process."""
EMPTY_ROWS = 1 << 20
"""More rows without text in succession are an error: a small compressed file can hold any number of them."""
FIRST_BAD_ROWS = 5
PARSED = "special tokens parsed"
"""Part of the identity of a source with parse_special_tokens."""
_MAX_REASON = 500
_LISTING_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files below a root, in reading order, and what becomes of their rows."""

    name: str
    root: Path
    files: tuple[Path, ...]
    text_key: str = "text"
    """Key or column that holds the text."""
    parse_special_tokens: bool = False
    chat: ChatOptions | None = None
    """None: the files hold text."""
    renderer: RowRenderer | None = None
    """Of chats, once the tokenizer is known."""
    left_out: str = ""
    """Which files below the root are not read, in words."""


class RowFormatError(ValueError):
    """A row of a format that is not read: all rows of the data are, so that skipping it is no remedy."""


@dataclass(kw_only=True)
class BadRows:
    """Counts rows that cannot be read; raises ConfigError when there are more than the limit."""

    limit: int
    count: int = 0
    without_targets: int = 0
    """Chats that have no turn to train on, which are left out but are not bad."""
    first: list[str] = field(default_factory=list)

    def add(self, place: str, *, error: Exception) -> None:
        if isinstance(error, RowFormatError):
            raise ConfigError(f"{shorten(place, max_chars=_MAX_REASON)}: {error}.") from error
        self.count += 1
        if self.count <= FIRST_BAD_ROWS:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"not JSON ({error.msg}, column {error.colno})"
            elif isinstance(error, UnicodeDecodeError):
                reason = f"not UTF-8 ({error.reason})"
            reason = reason.partition("; use sys.")[0]  # advice to programmers about numbers of many digits
            self.first.append(shorten(f"{place}: {reason}", max_chars=_MAX_REASON))
        self.check()

    def check(self) -> None:
        if self.count > self.limit:
            raise ConfigError(
                f"data.max_bad_rows = {self.limit}: the data has {self.report()}. "
                "Correct the data, or raise data.max_bad_rows to skip them."
            )

    def report(self) -> str:
        more = [f"and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        return f"{self.count} unreadable row(s) of text: {'; '.join([*self.first, *more])}"


def stdlib_source() -> Source:
    """Returns the source code of Python's standard library without its tests: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = tuple(file for file in _files_below(root, skipped=skipped) if file.suffix == ".py" and file.is_file())
    return Source(name="stdlib", root=root, files=files)


DATASETS: dict[str, Callable[[], Source]] = {"stdlib": stdlib_source}
"""Local datasets by the name that training.dataset selects."""

STAND_INS = {"c4_test": "stdlib"}
"""Small datasets that torchtitan ships, and what takes their place."""


def find_source(training: Training) -> Source:
    """Returns the local files that the options name; ConfigError if there are none."""
    if training.dataset_path is not None:
        option = f"training.dataset_path = {toml_like(training.dataset_path)}"
        if not training.dataset_path:
            raise ConfigError(describe_empty_path("training.dataset_path"))
        path = local_path(training.dataset_path)
        if path is None:
            rule = "is read from an object store by runs and prepare_data only"
            raise ConfigError(f"{option}: {rule}; copy the files, and set a local path.")
        source = _path_source(Path(path), option=option, text_key=training.text_key)
    else:
        option = f"training.dataset = {toml_like(training.dataset)}"
        name = _without_stand_in(training.dataset)
        if name not in DATASETS:
            raise ConfigError(
                f"{option}: unknown dataset; set it to one of {', '.join(sorted(DATASETS | HUB_DATASETS))} or to a "
                'dataset of the Hugging Face hub such as "org/name", or set training.dataset_path to your own files.'
            )
        source = DATASETS[name]()
    if not source.files:
        rule = "files and folders whose names begin with a dot are not read"
        raise ConfigError(f"{option}: no files to read in {source.root} ({rule}); add text files, or set another path.")
    if source.left_out:
        warn_once(source.left_out)
    if training.format == "chat":
        kinds = {file: kind_of(file, text_key=source.text_key).content for file in source.files}
        if others := [file for file, content in kinds.items() if content not in ("rows", "parquet")]:
            rule = 'has no rows, in lines of JSON or parquet; move it away, or set the option to "text"'
            raise ConfigError(f'training.format = "chat": {others[0]} {rule}.')
        return replace(source, chat=ChatOptions.of(training))
    if training.parse_special_tokens and holds_ids(source):
        rule = f"{source.name} holds token ids, among which those of special tokens are"
        raise ConfigError(f"training.parse_special_tokens = true: {rule}; set it to false.")
    return replace(source, parse_special_tokens=training.parse_special_tokens)


def holds_ids(source: Source) -> bool:
    """Returns whether a source has token ids of another program instead of text."""
    return holds_tokens(source.files) or has_token_rows(source.files, column=source.text_key)


@cache  # once in a process, which opens a source several times
def warn_once(text: str) -> None:
    """Logs a warning, on rank 0."""
    if environment_integer("RANK", default=0) == 0:
        logger.warning("%s", text)


@cache  # warns once
def _without_stand_in(dataset: str) -> str:
    if dataset in STAND_INS:
        name = STAND_INS[dataset]
        text = "training.dataset = %s: not part of this package; training on %s (the source code of Python's library)"
        logger.warning(text, toml_like(dataset), toml_like(name))
    return STAND_INS.get(dataset, dataset)


def _path_source(given: Path, *, option: str, text_key: str) -> Source:
    path = find_downloaded(given, repository="dataset")
    if not os.path.exists(path):  # unlike Path.exists also for a path that is too long
        hint = describe_download(str(path), repository="dataset")
        raise ConfigError(
            f"{option}: no such file or folder (current folder: {Path.cwd()}); name an existing one{hint}."
        )
    is_folder = os.path.isdir(path)
    below = _files_below(path) if is_folder else []
    files = (select_token_files(below, root=path) or tuple(below)) if is_folder else with_companions(path)
    if problems := [f"{option}: {problem}" for file in files if (problem := _find_file_error(file))]:
        raise ConfigError(problems)
    root = path if is_folder else path.parent
    kept, left_out = select_readable(files, root=root, text_key=text_key, option=option)
    return Source(name=str(given), root=root, files=kept, text_key=text_key, left_out=left_out)


def _find_file_error(file: Path) -> str | None:
    name = shorten(str(file), max_chars=_MAX_REASON)
    try:
        status = file.stat()
    except OSError as error:
        return f"{name} cannot be read ({error.strerror}); remove it, or correct the link or the permissions."
    if stat.S_ISDIR(status.st_mode):
        return f"{name} is a link to a folder, or cannot be read; replace it with a copy, or correct its permissions."
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a regular file but a pipe, socket or device; remove it."
    if status.st_size > 1 << 30 and status.st_blocks * 512 < status.st_size / 1000:
        sizes = f"{status.st_size:,} bytes, of which {status.st_blocks * 512:,} are on the disk"
        return f"{name} is almost empty: {sizes}; remove or replace it."
    return None


def _files_below(root: Path, *, skipped: Collection[str] = ()) -> list[Path]:
    """Returns the files below a folder by name, and the folders that are links, which can form loops, or unreadable."""
    paths: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=lambda error, paths=paths: paths.append(Path(error.filename))):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        paths += [Path(folder, name) for name in (*names, *links) if not name.startswith(".")]
    return sorted(paths, key=lambda file: file.relative_to(root).as_posix())


def describe_empty(source: Source) -> str:
    """Returns that none of the files of a source has text, or targets."""
    if source.chat is not None:
        rule = "no chat has a turn to train on: an assistant's, or one that the chat template marks as generated"
        return f"{source.name}: {rule}"
    return f"{source.name}: no text in {list_names(source.files, root=source.root)} of {source.root}"


def read_documents(source: Source, *, bad_rows: BadRows) -> Iterator[tuple[str, int]]:
    """Yields every document that has text, with the number of bytes of the source read so far."""
    read = partial(_read_file, text_key=source.text_key, bad_rows=bad_rows)
    return ((text, size) for text, size in read_files(source, read=read) if text)


def read_files(source: Source, *, read: Callable[..., Iterator[R]]) -> Iterator[tuple[R, int]]:
    """Yields what `read` finds in each file, with the number of bytes of the source read so far."""
    done = 0
    for file in source.files:
        with _opened(file) as raw:
            for found in read(raw, file=file):
                yield found, done + raw.tell()
            done += os.fstat(raw.fileno()).st_size


@contextmanager
def _opened(file: Path) -> "Iterator[io.BufferedReader[io.FileIO]]":
    try:
        with io.BufferedReader(open_regular(file, follow_links=True)) as content:
            yield content
    except (DocumentError, OSError) as error:  # of its reader too
        raise ConfigError(
            f"{file} cannot be read ({error}); replace or remove it, or correct its permissions."
        ) from error


def _read_file(raw: BinaryIO, *, file: Path, text_key: str, bad_rows: BadRows) -> Iterator[str]:
    kind = kind_of(file, text_key=text_key)
    if kind.content == "parquet":
        values = _parquet_values(file, text_key=text_key)

        def text_of(value: "pyarrow.Scalar") -> str:
            return text_of_row({text_key: value.as_py()}, text_key=text_key)

        return read_rows(values, text_of=text_of, file=file, bad_rows=bad_rows)
    stream = decompressed(raw, compression=kind.compression)
    if kind.content == "rows":
        lines = read_lines(stream, max_bytes=LINE_BYTES)
        return read_rows(lines, text_of=partial(_text_of_line, text_key=text_key), file=file, bad_rows=bad_rows)
    return _read_text(stream, file=file, bad_rows=bad_rows) if kind.content in ("text", "json") else iter(())


def read_lines(stream: BinaryIO, *, max_bytes: int) -> Iterator[bytes]:
    """Yields the lines; of a longer one the first `max_bytes` + 1 bytes."""
    while line := stream.readline(max_bytes + 1):
        yield line
        if len(line) > max_bytes:
            _skip_line(stream, line)


def _skip_line(stream: BinaryIO, block: bytes) -> None:
    while block and not block.endswith(b"\n"):
        block = stream.readline(BLOCK_BYTES)


def _read_text(stream: BinaryIO, *, file: Path, bad_rows: BadRows) -> Iterator[str]:
    line = 1
    try:
        for block in _blocks(stream):
            try:
                yield checked_size(block).decode()
            except UnicodeDecodeError as error:
                bad_line = line + block.count(b"\n", 0, error.start)
                bad_rows.add(f"{file}:{bad_line}", error=error)
            except ValueError as error:
                bad_rows.add(f"{file}:{line}", error=error)
            line += block.count(b"\n")
    except ERRORS as error:
        raise _corrupt_error(file, place=f"line {line}", error=error) from error


def _corrupt_error(file: Path, *, place: str, error: Exception) -> ConfigError:
    reason = shorten(str(error), max_chars=_MAX_REASON)
    return ConfigError(f"{file}: the data is corrupt after {place} ({reason}); replace the file.")


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yields blocks that end at line ends; of a line that is too long, more than DOCUMENT_BYTES of it."""
    rest = b""
    while block := rest + stream.read(BLOCK_BYTES - len(rest)):
        rest = b""
        if len(block) == BLOCK_BYTES:
            if end := block.rfind(b"\n") + 1:
                block, rest = block[:end], block[end:]
            else:
                block += stream.readline(DOCUMENT_BYTES)
        yield block
        if len(block) > DOCUMENT_BYTES:
            _skip_line(stream, block)


def checked_size(text: bytes) -> bytes:
    """Returns a text; ValueError if it is too long to be tokenized."""
    if len(text) > DOCUMENT_BYTES:
        raise ValueError(f"a text of more than {DOCUMENT_BYTES:,} bytes without an end; split it into documents")
    return text


def read_rows(rows: Iterable[T], *, text_of: Callable[[T], R], file: Path, bad_rows: BadRows) -> Iterator[R]:
    """Yields what is made of each row, if anything; counts the rows of which it cannot be made, by ValueError."""
    number = last = 0
    try:
        for number, row in enumerate(rows, start=1):
            try:
                if text := text_of(row):
                    last = number
                    yield text
                elif number - last > EMPTY_ROWS:
                    raise ConfigError(f"{file}: {EMPTY_ROWS:,} rows without text after row {last}; replace the file.")
            except (ValueError, RecursionError) as error:
                bad_rows.add(f"{file}:{number}", error=error)
    except ERRORS as error:
        raise _corrupt_error(file, place=f"row {number}", error=error) from error


def _text_of_line(line: bytes, *, text_key: str) -> str:
    return text_of_row(row_of_line(line), text_key=text_key) if line.strip() else ""


def row_of_line(line: bytes) -> object:
    """Returns the JSON value of a line; ValueError if it is too long or none."""
    if len(line) > LINE_BYTES:
        raise ValueError(f"a line of more than {LINE_BYTES:,} bytes; split its text into several rows")
    # Not documents.parse_json: values that are not used may be NaN, which Python's own json writes.
    return json.loads(line.decode())


def text_of_row(row: object, *, text_key: str) -> str:
    """Returns the text of a row; ValueError with the reason if it has none."""
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {json_type(row)}")
    if isinstance(row.get(text_key, []), list) and (conversation := describe_conversation(row)):  # a null is a bad row
        raise RowFormatError(conversation)
    if text_key not in row:
        keys = shorten(", ".join(map(repr, row))) or "no keys"
        raise ValueError(f"no key {text_key!r} (training.text_key) among {keys}")
    text = row[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} holds {json_type(text)}, not a string")
    try:
        checked_size(text.encode())
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise ValueError(f"{text_key!r} is not valid Unicode ({error.reason})") from error
    return text


def json_type(value: object) -> str:
    """Returns what a value of JSON is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _parquet_values(file: Path, *, text_key: str) -> Iterator["pyarrow.Scalar"]:
    def columns_of(schema: "pyarrow.Schema") -> list[str]:
        _check_column(schema, file=file, text_key=text_key)
        return [text_key]

    return chain.from_iterable(batch.column(0) for batch in read_parquet(file, columns_of=columns_of))


def read_parquet(file: Path, *, columns_of: "Callable[[pyarrow.Schema], list[str]]") -> "Iterator[pyarrow.RecordBatch]":
    """Yields a few rows at once, of the columns that are chosen; OSError if it is no complete parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        # Few rows: a file of a few kilobytes can hold many large values, all equal.
        yield from parquet.iter_batches(batch_size=8, columns=columns_of(parquet.schema_arrow))
    except (pyarrow.ArrowException, UnicodeError) as error:
        raise OSError(f"not a complete parquet file: {error}") from error


def _check_column(schema: "pyarrow.Schema", *, file: Path, text_key: str) -> None:
    option = f"training.text_key = {toml_like(text_key)}"
    if schema.names.count(text_key) != 1 or not _is_string(schema.field(text_key).type):
        turns = {field.name: _turn_of(field.type) for field in schema}
        if conversation := describe_conversation(turns):
            raise ConfigError(f"{file}: {conversation}.")
    if schema.names.count(text_key) != 1:
        number = "several such columns" if text_key in schema.names else "no such column"
        raise ConfigError(f"{option}: {file} has {number}; set it to one of {shorten(', '.join(schema.names))}.")
    kind = schema.field(text_key).type
    if not _is_string(kind):
        raise ConfigError(f"{option}: the column of {file} holds {shorten(str(kind))}, not strings; set it to another.")


def _is_string(kind: "pyarrow.DataType") -> bool:
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _turn_of(kind: "pyarrow.DataType") -> list[dict[str, None]]:
    """Returns an item of a column of lists of structures, with its fields; none for other columns."""
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind)
    return [{field.name: None for field in kind.value_type}] if is_list and types.is_struct(kind.value_type) else []


def source_fingerprint(source: Source, *, listing: Path, updates: bool = True) -> str:
    """Returns the hash of a source; the file `listing` caches the hash of each file, so that only changes are read.

    One process at a time may update the listing.
    """
    known = _read_listing(listing)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        entries = threads.map(lambda file: _entry(file, known=known.get(str(file))), source.files)
        files = dict(zip(map(str, source.files), entries, strict=True))
    if updates and files != known:
        write_atomically(listing, json.dumps(files).encode())
    names = [file.relative_to(source.root).as_posix() for file in source.files]
    contents = [(name, size, digest) for name, (size, _, digest) in zip(names, files.values(), strict=True)]
    return digest_of([contents, source.text_key, *reading_of(source)])


def reading_of(source: Source) -> list[str]:
    """Returns what identifies a source besides its files: how those are read whose names do not say so, and PARSED."""
    kinds = (kind_of(file, text_key=source.text_key) for file in source.files)
    descriptions = [f"{kind.content} {kind.compression}" if not kind.by_name else "" for kind in kinds]
    parsed = [PARSED] if source.parse_special_tokens else []
    rendered = [f"chats {source.renderer.identity}"] if source.renderer else []
    return [*(descriptions if any(descriptions) else []), *parsed, *rendered]


def _entry(file: Path, *, known: _Entry | None) -> _Entry:
    status = file.stat()
    if known is not None and known[:2] == (status.st_size, status.st_mtime_ns):
        return known
    with _opened(file) as content:
        return status.st_size, status.st_mtime_ns, hashlib.file_digest(content, "sha256").hexdigest()


def _read_listing(listing: Path) -> dict[str, _Entry]:
    try:
        entries = {
            name: entry.items(count=3) for name, entry in read_json(listing, max_bytes=_LISTING_BYTES).entries().items()
        }
        return {name: (size.integer(), time.integer(), digest.text()) for name, (size, time, digest) in entries.items()}
    except (FileNotFoundError, DocumentError):  # without it, all files are read again
        return {}
