"""Recognizes what files hold by their names and first bytes, so that no format is trained on as text by mistake.

text      one document, or several if it is long
rows      lines of JSON, each with a document
parquet   a table with a column of documents
json      one JSON value: metadata beside rows, else text
tokens    token ids of another program, see formats
binary    no text; the `problem` says what it is if that is known
foreign   data of a format that is not read; the `problem` says which, and how to convert it

Of a folder the files that are read are selected: what is left out is said, and is an error if it is much. Compressed
ones (gzip, bzip2, xz, zstandard) are decompressed as streams, in bounded memory.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.formats import TOKEN_SUFFIXES
from torchtitan_clone.documents import DocumentError, open_regular, shorten

if TYPE_CHECKING:
    import zstandard
    from _typeshed import WriteableBuffer

Content = Literal["text", "rows", "parquet", "json", "tokens", "binary", "foreign"]

ROW_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson", ".jl")
_FIRST_ROW_NAMES = re.compile(r"\.(jsonl(\.gz|\.zst)?|json\.(gz|zst))$")
"""The files of rows of version 0.1, which read those of other names as text, or not at all."""
LINE_BYTES = 1 << 26
"""A longer line of JSON is a bad row: it holds a text of the longest size with every character escaped."""
_COMPRESSIONS = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
"""Compression by the end of a file's name."""
_COMPRESSED_MAGIC = {b"\x1f\x8b\x08": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\0": "xz"}
_COMPRESSED_MAGIC |= {b"BZh%d1AY&SY" % level: "bz2" for level in range(1, 10)}
"""Compression by the first bytes of a file."""
ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What the streams raise if the data is truncated or corrupt."""
_MAX_WINDOW = 1 << 31
"""The longest window of a zstandard frame: that of `zstd --long=31`."""
_HEAD_BYTES = 1 << 13
_RECORD_BYTES = 1 << 20
SMALL_SHARE = 0.01
"""More of the bytes of a folder in files that are not read are an error."""
_METADATA_BYTES = 1 << 20
"""A larger file of metadata counts as one that is not read."""
_METADATA = re.compile(r"_success|_(committed|started)_.*|_(common_)?metadata", re.IGNORECASE)
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|md5sums?|sha256sums?)(\.\w+)?", re.IGNORECASE)

_BY_PROGRAM = "write the text of its samples to .jsonl or .parquet with that program, see docs/data.md"
_AS_TABLE = 'convert it to .jsonl or .parquet with the text in "text" (training.text_key), or remove it'
_CSV = ("a table, of which commas, quotes and numbers would be trained on", _AS_TABLE)
_SHARD = ("a shard of MosaicML Streaming (MDS) or a chunk of LitData", _BY_PROGRAM)
_TAR = ("a tar archive, as those of WebDataset", "unpack it into a folder, see docs/data.md")
_DATATROVE = (
    "a file of datatrove's token ids",
    "move each NAME.ds, without its .index and .metadata, to NAME.bin in a folder of its own if the ids end documents "
    "with the tokenizer's end-of-text token, see docs/data.md",
)
_COMPRESSED_TABLE = ("a compressed parquet file", "decompress it: the columns in it are compressed")
_WARC = ("a web archive (WARC), of which headers and markup would be trained on", "extract its text")
_RECORDS = "JSON records, of which brackets and keys would be trained on: write one on each line of a .jsonl file"
_COMPRESSED = "decompress it, or compress it with gzip, bzip2, xz or zstd"


def _encoded(encoding: str) -> tuple[str, str]:
    return f"text in {encoding}, not UTF-8", f"convert it with `iconv -f {encoding} -t UTF-8`"


_BY_NAME = [
    (r"\.(csv|tsv)(\.(gz|zst|bz2|xz|zip))?", *_CSV),
    (r"\.(orc|avro)", "a table", _AS_TABLE),
    (r"\.mds(\.\w+)?", "a shard of MosaicML Streaming (MDS)", _BY_PROGRAM),
    (r"(^|/)chunk-\d+-\d+(\.\w+)*\.bin", "a chunk of LitData", _BY_PROGRAM),
    (r"\.ds(\.(index|metadata|loss))?", *_DATATROVE),
    (r"\.(tar|tgz|tbz2|txz)(\.\w+)?", *_TAR),
    (r"\.(tfrecords?|array_record|riegeli)([.-][\w.-]+)?", "a file of binary records (TFRecord)", _BY_PROGRAM),
    (r"\.(lz4|br|sz|snappy|lzma)", "compressed in a format that is not read", _COMPRESSED),
    (r"\.warc(\.\w+)?", *_WARC),
]  # fmt: skip
_BY_MAGIC = {
    b"Obj\1": ("a table (Avro)", _AS_TABLE),
    b"ARROW1\0\0": ("an Arrow or Feather file", _AS_TABLE),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", _AS_TABLE),
    b"WARC/1.": _WARC,
    b"\x04\x22\x4d\x18": ("compressed with LZ4", _COMPRESSED),
    b"\xff\6\0\0sNaPpY": ("compressed with Snappy", _COMPRESSED),
    b"\xff\xfe\0\0": _encoded("UTF-32"),
    b"\xff\xfe": _encoded("UTF-16"),
    b"\xfe\xff": _encoded("UTF-16"),
}
_NO_TEXT = {b"PK\3\4": "a zip archive", b"SQLite format 3\0": "an SQLite database", b"%PDF-": "a PDF document"}
_NO_TEXT |= {b"7z\xbc\xaf": "a 7z archive", b"Rar!\x1a\7": "a RAR archive", b"\x89PNG": "a picture"}
_PAIRS = [{"instruction", "output"}, {"instruction", "response"}, {"prompt", "completion"}, {"prompt", "response"}]
_PAIRS += [{"prompt", "chosen"}, {"question", "answer"}, {"question", "response"}]
_AS_CHAT = 'set training.format = "chat" to train on the answers alone'
_AS_MESSAGES = "rename it to 'messages', its keys to 'role' and 'content', and "
_NAMES = [(re.compile(f"(?:{pattern})$", re.IGNORECASE), what, remedy) for pattern, what, remedy in _BY_NAME]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a file holds, and how it is compressed."""

    content: Content
    compression: str = ""
    problem: str = ""
    by_name: bool = True
    """Whether its name alone says so, and did in version 0.1, so that its token stores are valid."""


def kind_of(path: Path, *, text_key: str) -> Kind:
    """Returns what a file holds. DocumentError and OSError if it is no regular file, or unreadable."""
    status = path.stat()
    return _kind_of(path, text_key, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 20)  # a start looks at each file several times
def _kind_of(path: Path, text_key: str, size: int, _time: int) -> Kind:
    name = path.name.lower()
    for pattern, what, remedy in _NAMES:
        if pattern.search(name):
            return _foreign(what, remedy)
    stem, dot, last = name.rpartition(".")
    named = _COMPRESSIONS.get(dot + last, "")
    stem = stem if named else name
    with open_regular(path, follow_links=True) as raw:
        head = raw.read(_HEAD_BYTES)
        if foreign := _offsets_format(raw, head=head, size=size):
            return _foreign(*foreign)
        if name.endswith(TOKEN_SUFFIXES):
            is_zip = head.startswith(b"PK\3\4")  # also a model of PyTorch; ids can have the values of shorter numbers
            return Kind(content="binary", problem=_NO_TEXT[b"PK\3\4"]) if is_zip else Kind(content="tokens")
        compression = named or next((kind for magic, kind in _COMPRESSED_MAGIC.items() if head.startswith(magic)), "")
        if compression:
            raw.seek(0)
            try:
                head = decompressed(raw, compression=compression).read(_HEAD_BYTES)
            except ERRORS:
                head = b""  # reported when it is read
        elif head.startswith(b"PAR1") and not name.endswith(".parquet"):
            raw.seek(-4, os.SEEK_END)
            if raw.read(4) == b"PAR1":
                return Kind(content="parquet", by_name=False)
    if name.endswith(".parquet"):
        return Kind(content="parquet")
    return _kind_of_content(path, head, stem=stem, compression=compression, text_key=text_key)


def _kind_of_content(path: Path, head: bytes, *, stem: str, compression: str, text_key: str) -> Kind:
    """Returns the kind of what is neither a table nor token ids, by its first bytes after decompression."""
    formats = [format_ for magic, format_ in _BY_MAGIC.items() if head.startswith(magic)]
    if compression and head.startswith(b"PAR1"):
        formats = [_COMPRESSED_TABLE]
    if head[257:262] == b"ustar":
        formats = [_TAR]
    if not formats and (encoding := _wide_encoding(head)):
        formats = [_encoded(encoding)]
    if formats:
        return _foreign(*formats[0])
    is_rows = stem.endswith(ROW_SUFFIXES) or (bool(compression) and stem.endswith(".json"))
    rows = Kind(content="rows", compression=compression, by_name=bool(_FIRST_ROW_NAMES.search(path.name.lower())))
    no_text = [what for magic, what in _NO_TEXT.items() if head.startswith(magic)]
    if no_text or (b"\0" in head and not is_rows):
        return Kind(content="binary", problem=no_text[0] if no_text else "")
    start = head.lstrip()
    if not is_rows or stem.endswith(".json"):
        if start.startswith(b"{") and _has_lines_of_json(path, compression=compression, text_key=text_key):
            return rows
        if stem.endswith(".json") and _has_records(path, start, compression=compression, text_key=text_key):
            return Kind(content="binary", problem=_RECORDS)
    if is_rows:
        return rows
    return Kind(content="json" if stem.endswith(".json") else "text", compression=compression, by_name=not compression)


def _foreign(what: str, remedy: str) -> Kind:
    return Kind(content="foreign", problem=f"is {what}; {remedy}")


def _offsets_format(raw: BinaryIO, *, head: bytes, size: int) -> tuple[str, str] | None:
    """Recognizes MDS and LitData: a number of samples n, then n + 1 offsets, of which the last is the size of the file.

    All are uint32. Sources: mosaicml-streaming streaming/base/format/mds/writer.py, litdata streaming/writer.py.
    """
    samples = int.from_bytes(head[:4], "little")
    first = int.from_bytes(head[4:8], "little")
    if not (samples and 4 * (samples + 2) <= first <= size):
        return None
    raw.seek(4 * (samples + 1))
    last = int.from_bytes(raw.read(4), "little")
    return _SHARD if last == size else None


def _wide_encoding(head: bytes) -> str:
    """Returns UTF-16 with its byte order, which no mark states, where every second byte is 0; else ""."""
    half = len(head) // 2
    for place, encoding in enumerate(("UTF-16BE", "UTF-16LE")):
        if half >= 8 and head[place::2].count(0) > 0.7 * half and head[1 - place :: 2].count(0) < 0.1 * half:
            return encoding
    return ""


def _has_lines_of_json(path: Path, *, compression: str, text_key: str) -> bool:
    """Returns whether the first two lines are JSON objects, or the only one is and has the text."""
    have_text: list[bool] = []
    with io.BufferedReader(open_regular(path, follow_links=True)) as raw:
        stream = decompressed(raw, compression=compression)
        try:
            while len(have_text) < 2 and (line := stream.readline(LINE_BYTES + 1)):
                if line.strip():
                    have_text.append(_has_text(line, text_key=text_key))  # not the value, which may be large
        except (*ERRORS, ValueError, RecursionError):
            return False
    return len(have_text) == 2 or have_text == [True]


def _has_text(line: bytes, *, text_key: str) -> bool:
    """Returns whether a line of JSON has the text; ValueError if it is no object."""
    if len(line) > LINE_BYTES or not isinstance(value := json.loads(line), dict):
        raise ValueError("not a row")
    return isinstance(value.get(text_key), str)


def _has_records(path: Path, start: bytes, *, compression: str, text_key: str) -> bool:
    """Returns whether one JSON value is an array of objects, or an object that holds a text itself."""
    if re.match(rb"\[\s*\{", start):
        return True
    if not start.startswith(b"{") or path.stat().st_size > _RECORD_BYTES:
        return False
    with open_regular(path, follow_links=True) as raw:
        try:
            value = json.loads(decompressed(raw, compression=compression).read(_RECORD_BYTES))
        except (*ERRORS, ValueError, RecursionError):
            return False
    return isinstance(value, dict) and isinstance(value.get(text_key), str)


def select_readable(files: Sequence[Path], *, root: Path, text_key: str, option: str) -> tuple[tuple[Path, ...], str]:
    """Returns the files that are read, and in words which others the root has.

    ConfigError for data in a format that is not read, and if more than a small share of the bytes is in other files.
    """
    kinds = _kinds_of(files, text_key=text_key)
    foreign = defaultdict[str, list[Path]](list)
    for file, kind in kinds.items():
        if kind.content == "foreign":
            foreign[kind.problem].append(file)
    if foreign:
        raise ConfigError([f"{option}: {_first(of_problem)} {problem}." for problem, of_problem in foreign.items()])
    contents = {kind.content for kind in kinds.values()}
    if contents == {"tokens"}:
        return tuple(files), ""
    is_table = bool(contents & {"rows", "parquet"})
    unreadable = {"binary", "tokens"} if is_table or "text" in contents else {"binary", "tokens", "json"}
    metadata = {file: kind for file, kind in kinds.items() if _is_metadata(file, kind, beside_rows=is_table)}
    unread = {file: kind for file, kind in kinds.items() if kind.content in unreadable and file not in metadata}
    _check_share([*unread, *(file for file in metadata if file.stat().st_size > _METADATA_BYTES)], kinds, option=option)
    kept = tuple(file for file in files if file not in unread and file not in metadata)
    left_out = [f"{list_names([*unread], root=root)} (not text)"] if unread else []
    left_out += [f"{list_names([*metadata], root=root)} (metadata)"] if metadata else []
    notes = [f"left out of {shorten(str(root))}: {'; '.join(left_out)}"] if left_out else []
    if is_table and (texts := [file for file in kept if kinds[file].content == "text"]):
        notes.append(f"read as plain text, beside files of rows: {list_names(texts, root=root)}")
    return kept, "; ".join(notes)


def _kinds_of(files: Sequence[Path], *, text_key: str) -> dict[Path, Kind]:
    def find(file: Path) -> Kind:
        try:
            return kind_of(file, text_key=text_key)
        except (DocumentError, OSError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); remove it, or correct its permissions.") from error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(zip(files, threads.map(find, files), strict=True))


def _is_metadata(path: Path, kind: Kind, *, beside_rows: bool) -> bool:
    """Returns whether a file is metadata: of Spark and Parquet, and beside rows also JSON, a README or a licence."""
    named = _METADATA.fullmatch(path.name) or (beside_rows and kind.content == "text" and _ABOUT.fullmatch(path.name))
    return bool(named) or (beside_rows and kind.content == "json")


def _check_share(unread: Sequence[Path], kinds: Mapping[Path, Kind], *, option: str) -> None:
    if not unread:
        return  # without asking for the size of each file
    sizes = {file: file.stat().st_size for file in kinds}
    lost, total = sum(sizes[file] for file in unread), sum(sizes.values())
    if lost <= SMALL_SHARE * total:
        return
    largest = max(unread, key=lambda file: sizes[file])
    content = kinds[largest].content
    what = {"json": "JSON, of which brackets and keys would be trained on", "tokens": "token ids or an array"}
    described = kinds[largest].problem or what.get(content, "not text")
    remedy = {
        "json": "rename it to .jsonl if each of its lines is a record with text, or to .txt to train on all of it",
        "tokens": "move it to a folder of its own, which may have nothing but token ids and their metadata",
    }
    share = f", and {lost / total:.0%} of the bytes would be left out" if len(kinds) > 1 else ""
    names = _first([largest, *(file for file in unread if file != largest)])
    remedied = remedy.get(content, "convert it to .jsonl or .parquet, or move it away")
    raise ConfigError(f"{option}: {names} is {described}{share}; {remedied}.")


def _first(files: Sequence[Path]) -> str:
    """Returns the first path and the number of the others."""
    return shorten(str(files[0]), max_chars=500) + (f" (and {len(files) - 1:,} more)" if len(files) > 1 else "")


def list_names(files: Sequence[Path], *, root: Path, limit: int = 5) -> str:
    """Returns the names of the first files, and the number of the others."""
    names = [shorten(file.relative_to(root).as_posix()) for file in files[:limit]]
    return ", ".join(names) + (f" and {len(files) - limit:,} more" if len(files) > limit else "")


def decompressed(raw: BinaryIO, *, compression: str) -> BinaryIO:
    """Returns a stream of the decompressed data; `raw` itself if `compression` is empty."""
    if compression == "gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw))
    if compression == "bz2":
        return cast("BinaryIO", bz2.BZ2File(raw))
    if compression == "xz":
        return cast("BinaryIO", lzma.LZMAFile(raw))
    if compression == "zst":
        return io.BufferedReader(_ZstdReader(raw))
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses frame by frame, because zstandard's own reader accepts a truncated file."""

    INPUT_BYTES = 1 << 10
    """Become at most 32 MiB: a block of 128 KiB has at least 4 bytes."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fills the buffer from the data; 0 at its end. EOFError if it is truncated, OSError if it is corrupt.

        DocumentError if it needs too much memory.
        """
        while not self._output:
            self._input = self._input or self._raw.read(self.INPUT_BYTES)
            if not self._input:
                break
            self._decompress()
        if self._frame is not None and not self._output:
            raise EOFError("truncated within a frame")
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress(self) -> None:
        import zstandard

        frame = self._frame or zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        try:
            self._output = memoryview(frame.decompress(self._input))
        except zstandard.ZstdError as error:
            reason = str(error).rpartition(": ")[2]
            if "too much memory" in reason:
                raise DocumentError("its window is longer than 2 GiB: compress it with zstd --long=31") from error
            raise OSError(reason) from error
        self._input = frame.unused_data
        self._frame = None if frame.eof else frame


def describe_conversation(row: Mapping[str, object]) -> str:
    """Returns what to do with a row of a chat, or of a prompt and its answer; "" for others."""
    for key, value in row.items():
        turn = value[0] if isinstance(value, list) and value else None
        if isinstance(turn, dict) and ("role" in turn or "from" in turn):
            named = "" if key == "messages" and "role" in turn else _AS_MESSAGES
            return f"{shorten(key)!r} is a chat; {named}{_AS_CHAT}"
    pair = next((pair for pair in _PAIRS if pair <= row.keys()), None)
    if pair is None:
        return ""
    named = "" if pair == {"prompt", "completion"} else "rename them to 'prompt' and 'completion', and "
    return f"{' and '.join(map(repr, sorted(pair)))} are a prompt and its answer; {named}{_AS_CHAT}"
