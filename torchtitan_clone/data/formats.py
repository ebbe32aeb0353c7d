"""Token ids in the files of other programs, indexed once and then read in place by memory map.

    NAME.bin, NAME.idx       Megatron: documents of one or more sequences
    NAME.bin                 nanoGPT: a stream of ids; llm.c: the same after a header of 256 int32
    NAME.npy                 OLMo: a stream of ids without a header; or NumPy's format with one dimension
    NAME.arrow               `datasets.Dataset.save_to_disk`, or Arrow's file format: a column with ids of documents

A document of a *stream* ends at the tokenizer's end-of-text token, also across files; of the other formats, where the
file's index says. Where such a document does not end with that token, it is *added* when the ids are read.
"""

import logging
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.data.slices import Segment, TokenArray, map_bytes
from torchtitan_clone.documents import DocumentError, shorten

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger("torchtitan_clone")

TOKEN_FILES = (".bin", ".npy", ".arrow")
TOKEN_SUFFIXES = (*TOKEN_FILES, ".idx")
_METADATA = re.compile(r"\.(idx|json|md|csv\.gz|pkl)$")
_VALIDATION = re.compile(r"(^|[._-])(val|valid|validation|test)([0-9._-]|$)")
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
LLMC_HEADER_BYTES = 1024
LLMC_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Type of the ids by the first two numbers of the header: magic number and version."""
_LLMC_MAGIC = {20240520: "training data", 20240801: "training data", 20240522: "evaluation data"}
_NUMPY_HEADER = re.compile(rb"\{'descr': '([<|][iu][1248])', 'fortran_order': \w+, 'shape': \(([0-9]{1,18}),\), \} *\n")
_CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class SplitIndex:
    """The documents of a split. Positions count the ids of its segments and the added end-of-text tokens."""

    segments: list[Segment]
    offsets: np.ndarray
    """int64; start of each document, and the end of the last."""
    added: np.ndarray
    """int64; positions of the added tokens."""


def select_token_files(files: Sequence[Path], *, root: Path) -> tuple[Path, ...]:
    """Returns the files of token ids and their indices, () if the files are text.

    A folder holds token ids if it has nothing else but metadata, or if one directly in it is named "train".
    """
    token_files = [path for path in files if path.suffix in TOKEN_FILES]
    is_named = any(path.parent == root and "train" in path.stem for path in token_files)
    if not token_files or not (
        is_named or all(path.suffix in TOKEN_FILES or _METADATA.search(path.name) for path in files)
    ):
        return ()
    # cache-*.arrow: results that `datasets` keeps beside the data. Folders in the list are errors.
    return tuple(
        path for path in files if (path.suffix in TOKEN_SUFFIXES and path.name[:6] != "cache-") or path.is_dir()
    )


def with_companions(path: Path) -> tuple[Path, ...]:
    """Returns a file of token ids, its index and, beside a file of training data, that of validation data."""
    if path.suffix not in TOKEN_SUFFIXES:
        return (path,)
    path = path.with_suffix(".bin") if path.suffix == ".idx" else path
    validation = path.with_name(path.name.replace("train", "val"))
    named = (path, validation) if _VALIDATION.search(validation.stem) else (path,)
    candidates = dict.fromkeys(file for each in named for file in (each, each.with_suffix(".idx")))
    return tuple(file for file in candidates if file == path or file.is_file())


def holds_tokens(files: Sequence[Path]) -> bool:
    """Returns whether the files of a source are token ids that are read in place."""
    return bool(files) and all(path.suffix in TOKEN_SUFFIXES for path in files)


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """Files of token ids, the column that holds them in a table, and the vocabulary that they are compared with."""

    files: tuple[Path, ...]
    root: Path
    column: str
    vocab_size: int
    eos_id: int

    def index(self, *, held_out_fraction: float) -> dict[str, SplitIndex]:
        """Returns the segments and documents of each split.

        Held out are the files that are named so, else the last documents, or the end of the only one. ConfigError if a
        file is not what its name says, or holds ids outside the vocabulary.
        """
        self._check_pairs()
        numbers = [number for number, path in enumerate(self.files) if path.suffix in TOKEN_FILES]
        named = named_validation([self.files[number] for number in numbers], root=self.root)
        indexed = self._index_files([number for number in numbers if self.files[number] not in named])
        if named:
            validation = self._index_files([number for number in numbers if self.files[number] in named])
            return {"train": indexed, "validation": validation}
        if len(indexed.offsets) == 2 and held_out_fraction > 0:
            return _cut_document(indexed, fraction=held_out_fraction)
        documents = len(indexed.offsets) - 1
        kept = min(documents, max(1, documents - int(np.ceil(documents * held_out_fraction))))
        return {"train": _cut(indexed, 0, kept), "validation": _cut(indexed, kept, documents)}

    def _check_pairs(self) -> None:
        """Megatron's files come in pairs: without its index a file would be one of another format."""
        indexes = [path for path in self.files if path.suffix == ".idx"]
        pairs = [(path, path.with_suffix(".bin")) for path in indexes]
        pairs += [(path, path.with_suffix(".idx")) for path in self.files if indexes and path.suffix == ".bin"]
        for path, other in pairs:
            if other not in self.files:
                refuse(path, f"{other.name} is missing beside it; copy it too, or move this file away")

    def _index_files(self, numbers: Sequence[int]) -> SplitIndex:
        segments: list[Segment] = []
        ends = [np.zeros(1, dtype=np.int64)]
        lacking = [np.empty(0, dtype=np.int64)]
        total = 0
        for segment, ends_in_segment in chain.from_iterable(map(self._segments, numbers)):
            for ends_of_chunk, without_eos in self._scan(segment, ends=ends_in_segment):
                ends.append(total + ends_of_chunk)
                lacking.append(total + without_eos)
            segments.append(segment)
            total += segment.tokens
        stored = np.concatenate(ends)
        if stored[-1] < total:  # a stream that ends within a document
            stored = np.append(stored, total)
            lacking.append(np.array([total]))
        missing = np.concatenate(lacking)
        warn_about_blocks(np.diff(stored), without_eos=len(missing), path=self.root)
        offsets = stored + np.searchsorted(missing, stored, side="right")
        return SplitIndex(segments=segments, offsets=offsets, added=missing + np.arange(len(missing)))

    def _scan(self, segment: Segment, *, ends: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Checks all ids; yields the ends of the documents, and those of them that no end-of-text token precedes."""
        ids = TokenArray([segment], files=self.files, added=np.empty(0), eos_id=0)
        for first in range(0, segment.tokens, _CHUNK):
            chunk = ids[first : first + _CHUNK]
            check_ids(chunk, vocab_size=self.vocab_size, path=self.files[segment.file])
            if ends is None:
                yield first + 1 + np.flatnonzero(chunk == self.eos_id), np.empty(0, dtype=np.int64)
            else:
                here = ends[slice(*np.searchsorted(ends, [first, first + len(chunk)], "right"))]
                yield here, here[chunk[here - first - 1] != self.eos_id]

    def _segments(self, number: int) -> Iterator[tuple[Segment, np.ndarray | None]]:
        path = self.files[number]
        try:
            yield from self._reader(path)(path, number=number)
        except DocumentError as error:
            refuse(path, f"{error}; replace the file")

    def _reader(self, path: Path) -> Callable[..., Iterator[tuple[Segment, np.ndarray | None]]]:
        if path.suffix == ".arrow":
            return partial(_read_arrow, column=self.column)
        if path.suffix == ".bin" and path.with_suffix(".idx") in self.files:
            return _read_megatron
        return partial(_read_stream, raw_dtype="uint16" if self.vocab_size <= 1 << 16 else "uint32")


def refuse(path: Path, problem: str) -> NoReturn:
    """Raises ConfigError about a file of token ids."""
    raise ConfigError(f"{shorten(str(path))}: {problem}.")


def check_ids(ids: np.ndarray, *, vocab_size: int, path: Path) -> None:
    """ConfigError if an id is outside the vocabulary."""
    lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or highest >= vocab_size:
        wrong = f"token id {lowest if lowest < 0 else highest}, and the tokenizer has the ids 0 to {vocab_size - 1}"
        refuse(path, f"{wrong}; set model.hf_assets_path to the tokenizer that the ids were made with")


def warn_about_blocks(lengths: np.ndarray, *, without_eos: int, path: Path) -> None:
    """Warns of documents that are all as long as the first, which the last may not fill, and lack the end of text."""
    if len(lengths) == without_eos > 1 and (lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0]:
        logger.warning(
            "%s: all %s documents have %s tokens, and none ends with the end-of-text token, as if a text had been cut "
            "into blocks; each is taken for a document, so save whole documents, or one array of all tokens (.npy)",
            shorten(str(path)), f"{len(lengths):,}", f"{int(lengths[0]):,}",
        )  # fmt: skip


def named_validation(files: Sequence[Path], *, root: Path) -> set[Path]:
    """Returns the files whose names, or those of their folders, say that they are held out; none if all do."""
    parts = {path: (*path.relative_to(root).parts[:-1], path.stem) for path in files}
    named = {path for path in files if any(map(_VALIDATION.search, parts[path]))}
    return named if len(named) < len(files) else set()


def _cut(index: SplitIndex, first: int, last: int) -> SplitIndex:
    """Returns the documents in [first, last) of a split."""
    start, stop = int(index.offsets[first]), int(index.offsets[last])
    low, high = np.searchsorted(index.added, [start, stop])
    left, right = start - int(low), stop - int(high)  # among the ids that are in the files
    segments: list[Segment] = []
    position = 0
    for segment in index.segments:
        inside = max(0, left - position), min(segment.tokens, right - position)
        position += segment.tokens
        if inside[0] < inside[1]:
            segments.append(segment.part(*inside))
    return SplitIndex(
        segments=segments, offsets=index.offsets[first : last + 1] - start, added=index.added[low:high] - start
    )


def _cut_document(index: SplitIndex, *, fraction: float) -> dict[str, SplitIndex]:
    """Holds out the end of the only document; the end-of-text token is added where it is cut."""
    stored = int(index.offsets[-1]) - len(index.added)
    cut = max(1, stored - int(np.ceil(stored * fraction)))
    if cut == stored:
        return {"train": index, "validation": _cut(index, 1, 1)}
    halves = SplitIndex(
        segments=index.segments,
        offsets=np.array([0, cut + 1, int(index.offsets[-1]) + 1]),
        added=np.concatenate([[cut], index.added + 1]),
    )
    return {"train": _cut(halves, 0, 1), "validation": _cut(halves, 1, 2)}


def _read_megatron(path: Path, *, number: int) -> Iterator[tuple[Segment, np.ndarray | None]]:
    """Source: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM."""
    index = path.with_suffix(".idx")
    content = map_bytes(index)
    header = struct.Struct("<9sQBQQ")
    if len(content) < header.size:
        raise DocumentError(f"{index.name} has {len(content)} bytes, fewer than its header")
    magic, version, code, sequences, count = header.unpack(content[: header.size].tobytes())
    if (magic, version) != (MEGATRON_MAGIC, 1):
        raise DocumentError(f"{index.name} is not an index of Megatron (version 1)")
    if code not in MEGATRON_DTYPES:
        raise DocumentError(f"{index.name} states the type {code}; known: {MEGATRON_DTYPES}")
    expected = header.size + 12 * sequences + 8 * count
    if len(content) not in (expected, expected + sequences):  # a mode for each sequence may follow
        asked = f"{sequences:,} sequences and {count:,} documents, which take {expected:,}"
        raise DocumentError(f"{index.name} has {len(content):,} bytes, and states {asked}")
    dtype = MEGATRON_DTYPES[code]
    arrays = np.split(content[header.size : expected], [4 * sequences, 12 * sequences])
    lengths, pointers, documents = (array.view(kind) for array, kind in zip(arrays, ("<i4", "<i8", "<i8"), strict=True))
    ends = np.cumsum(np.concatenate([[0], lengths]), dtype=np.int64)
    item = np.dtype(dtype).itemsize
    if (lengths < 0).any() or not np.array_equal(pointers, item * ends[:-1]):
        raise DocumentError(f"{index.name}: the sequences do not follow one another without gaps")
    if not count or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DocumentError(f"{index.name}: the documents do not reach from sequence 0 to {sequences:,}")
    if (size := path.stat().st_size) != item * ends[-1]:
        raise DocumentError(f"{size:,} bytes, and {index.name} states {ends[-1]:,} ids of type {dtype}")
    yield Segment(file=number, start=0, dtype=dtype, tokens=int(ends[-1])), _rising(ends[documents])


def _rising(ends: np.ndarray) -> np.ndarray:
    """Returns the ends of the documents that are not empty."""
    return ends[1:][np.diff(ends) > 0]


def _read_stream(path: Path, *, number: int, raw_dtype: str) -> Iterator[tuple[Segment, np.ndarray | None]]:
    """Reads a header of llm.c or NumPy; other files are ids from their start, of the type that the vocabulary needs."""
    content = map_bytes(path)
    start, dtype, count = 0, raw_dtype, None
    magic, version, stated = struct.unpack("<3i", content[:12].tobytes().ljust(12, b"\0"))
    if content[:6].tobytes() == b"\x93NUMPY":
        start, dtype, count = _numpy_header(content)
    elif path.suffix == ".bin" and (magic, version) in LLMC_DTYPES:
        start, dtype, count = LLMC_HEADER_BYTES, LLMC_DTYPES[magic, version], stated
    elif path.suffix == ".bin" and magic in _LLMC_MAGIC:
        kind = f"{_LLMC_MAGIC[magic]} of llm.c in version {version}"
        raise DocumentError(f"{kind}; known versions of its training data: {sorted(LLMC_DTYPES)}")
    item = np.dtype(dtype).itemsize
    if count is None:
        count = len(content) // item
    if count < 0 or len(content) != start + item * count:
        raise DocumentError(f"{len(content):,} bytes, not {start:,} and {count:,} ids of type {dtype}")
    if start == 0 and dtype == "uint16" and count > 8 and not content[: 1 << 20].view("uint16")[1::2].any():
        raise DocumentError(
            "every second id is 0, as if the ids were of type uint32 while the tokenizer's fit in uint16"
        )
    if count:
        yield Segment(file=number, start=start, dtype=dtype, tokens=count), None


def _numpy_header(content: np.ndarray) -> tuple[int, str, int]:
    """Returns the offset, type and number of ids. numpy.lib.format would evaluate the header as an expression."""
    start = 10 + int.from_bytes(content[8:10].tobytes(), "little")
    header = content[10:start].tobytes()
    match = _NUMPY_HEADER.fullmatch(header)
    if match is None:
        shown = shorten(header.decode("latin-1").strip())
        raise DocumentError(f"NumPy's header {shown!r} is not that of integers in one dimension")
    return start, np.dtype(match[1].decode()).name, int(match[2])


def _read_arrow(path: Path, *, number: int, column: str) -> Iterator[tuple[Segment, np.ndarray | None]]:
    import pyarrow.ipc

    file = pyarrow.memory_map(str(path)).read_buffer()
    try:
        schema, batches = _open_arrow(file)
        check_list_column(schema, path=path, column=column)
        for batch in batches:
            batch.validate(full=True)
            if segment := _arrow_segment(batch.column(column), file=file, number=number):
                yield segment
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise DocumentError(f"not a complete Arrow stream ({shorten(str(error))})") from error


def _open_arrow(content: "pyarrow.Buffer") -> "tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]":
    """Opens Arrow's stream or file format."""
    import pyarrow.ipc

    if content.size >= 8 and content[:8].to_pybytes() == b"ARROW1\0\0":
        file = pyarrow.ipc.open_file(pyarrow.BufferReader(content))
        return file.schema, map(file.get_batch, range(file.num_record_batches))
    stream = pyarrow.ipc.open_stream(pyarrow.BufferReader(content))
    return stream.schema, iter(stream)


def check_list_column(schema: "pyarrow.Schema", *, path: Path, column: str) -> None:
    """Raises ConfigError unless the column holds lists of integers."""
    import pyarrow.types as types

    lists = [field.name for field in schema if is_list_of_ids(field.type)]
    if lists.count(column) != 1:
        remedy = f"set it to one of {shorten(', '.join(lists))}" if lists else "such files are not read as text"
        if not lists and any(types.is_string(field.type) or types.is_large_string(field.type) for field in schema):
            save = 'datasets.load_from_disk("FOLDER").to_parquet("data.parquet")'
            remedy = f"text is not read from Arrow files: save it with {save}, of a DatasetDict for each split"
        refuse(path, f"training.text_key = {toml_like(column)} names no column with lists of token ids; {remedy}")


def is_list_of_ids(kind: "pyarrow.DataType") -> bool:
    """Returns whether values of a type are lists of integers."""
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and types.is_integer(kind.value_type)


def _arrow_segment(
    column: "pyarrow.ListArray | pyarrow.FixedSizeListArray", *, file: "pyarrow.Buffer", number: int
) -> tuple[Segment, np.ndarray] | None:
    import pyarrow.types as types

    if types.is_fixed_size_list(column.type):
        offsets = column.type.list_size * np.arange(column.offset, column.offset + len(column) + 1)
    else:
        offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values
    if column.null_count or values.null_count:
        raise DocumentError("documents or ids are missing (null)")
    buffer = values.buffers()[1]
    if not len(offsets) or offsets[-1] == offsets[0]:
        return None
    dtype = str(values.type)
    item = np.dtype(dtype).itemsize
    start = buffer.address - file.address + item * (values.offset + int(offsets[0]))
    tokens = int(offsets[-1] - offsets[0])
    if not 0 <= start <= start + item * tokens <= file.size:
        raise DocumentError("the ids are compressed; save the dataset without compression")
    return Segment(file=number, start=start, dtype=dtype, tokens=tokens), _rising(offsets - offsets[0])


def has_token_rows(files: Sequence[Path], *, column: str) -> bool:
    """Returns whether the files are parquet files with token ids in a column, which cannot be read in place."""
    if not files or any(path.suffix != ".parquet" for path in files):
        return False
    import pyarrow  # not before: it takes 0.1 s
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(files[0])
    except (pyarrow.ArrowException, OSError, UnicodeError):
        return False  # reported when it is read
    return schema.names.count(column) == 1 and is_list_of_ids(schema.field(column).type)


def read_token_rows(files: Sequence[Path], *, column: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the ids of every document that has some, with the number of bytes read so far. ConfigError."""
    import pyarrow
    import pyarrow.parquet

    done = 0
    for path in files:
        done += path.stat().st_size
        try:
            parquet = pyarrow.parquet.ParquetFile(path)
            check_list_column(parquet.schema_arrow, path=path, column=column)
            for batch in parquet.iter_batches(batch_size=64, columns=[column]):
                for row in batch.column(0):
                    if row.values is None or row.values.null_count:
                        refuse(path, "documents or ids are missing (null); remove them")
                    if len(row.values):
                        yield row.values.to_numpy(), done
        except (pyarrow.ArrowException, OSError, UnicodeError) as error:
            refuse(path, f"not a complete parquet file ({shorten(str(error))}); replace the file")
