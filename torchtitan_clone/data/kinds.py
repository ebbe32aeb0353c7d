"""Recognizes what a file holds by its name and its first bytes, so that no format is trained on as text by mistake.

text      one document, or several if it is long
rows      lines of JSON, each with a document
parquet   a table with a column of documents
json      one JSON value: metadata beside rows, else text
tokens    token ids of another program, see formats
binary    no text; the `problem` says what it is if that is known
foreign   data of a format that is not read; the `problem` says which, and how to convert it
"""

import io
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from torchtitan_clone.data.compression import ERRORS, MAGIC, SUFFIXES, decompressed
from torchtitan_clone.data.formats import TOKEN_SUFFIXES
from torchtitan_clone.documents import open_regular

Content = Literal["text", "rows", "parquet", "json", "tokens", "binary", "foreign"]

ROW_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson", ".jl")
_FIRST_ROW_NAMES = re.compile(r"\.(jsonl(\.gz|\.zst)?|json\.(gz|zst))$")
"""The files of rows of version 0.1, which read those of other names as text, or not at all."""
LINE_BYTES = 1 << 26
"""A longer line of JSON is a bad row: it holds a text of the longest size with every character escaped."""
_HEAD_BYTES = 1 << 13
_RECORD_BYTES = 1 << 20

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
_UTF16 = ("text in UTF-16, not UTF-8", "convert it with `iconv -f UTF-16 -t UTF-8`")
_RECORDS = "JSON records, of which brackets and keys would be trained on: write one on each line of a .jsonl file"
_COMPRESSED = "decompress it, or compress it with gzip, bzip2, xz or zstd"

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
    b"\xff\xfe\0\0": ("text in UTF-32, not UTF-8", "convert it with `iconv -f UTF-32 -t UTF-8`"),
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_NO_TEXT = {b"PK\3\4": "a zip archive", b"SQLite format 3\0": "an SQLite database", b"%PDF-": "a PDF document"}
_NO_TEXT |= {b"7z\xbc\xaf": "a 7z archive", b"Rar!\x1a\7": "a RAR archive", b"\x89PNG": "a picture"}
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
    named = SUFFIXES.get(dot + last, "")
    stem = stem if named else name
    with open_regular(path, follow_links=True) as raw:
        head = raw.read(_HEAD_BYTES)
        if found := _offsets_format(raw, head=head, size=size):
            return _foreign(*found)
        if name.endswith(TOKEN_SUFFIXES):
            is_zip = head.startswith(b"PK\3\4")  # also a model of PyTorch; ids can have the values of shorter numbers
            return Kind(content="binary", problem=_NO_TEXT[b"PK\3\4"]) if is_zip else Kind(content="tokens")
        compression = named or next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")
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
    found = [format_ for magic, format_ in _BY_MAGIC.items() if head.startswith(magic)]
    if compression and head.startswith(b"PAR1"):
        found = [_COMPRESSED_TABLE]
    if head[257:262] == b"ustar":
        found = [_TAR]
    if not found and _is_wide(head):
        found = [_UTF16]
    if found:
        return _foreign(*found[0])
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


def _is_wide(head: bytes) -> bool:
    """Returns whether every second byte is 0, as in UTF-16 without a byte order mark."""
    half = len(head) // 2
    return half >= 8 and any(
        head[place::2].count(0) > 0.7 * half and head[1 - place :: 2].count(0) < 0.1 * half for place in (0, 1)
    )


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
