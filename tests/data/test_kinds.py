"""Files are read as what they are, whatever their name; what is not read is an error, or said at every start."""

import bz2
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.feather
import pytest
import zstandard

from tests.data.corpora import jsonl, open_corpus, parquet, texts, write, zst
from tests.data.test_sources import read
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data.opening import describe_source
from torchtitan_clone.data.sources import BLOCK_BYTES, find_source, source_fingerprint
from torchtitan_clone.data.token_store import digest_of

ROOT = Path(__file__).parents[2]
ROWS = texts(20)
LINES = jsonl(ROWS)
PROSE = "Über text.\n" * 50


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.ndjson", LINES),
        ("a.jsonlines", LINES),
        ("a.json", LINES),
        ("a.json", jsonl(ROWS[:1])),
        ("a.jsonl.1", LINES),
        ("part-00000", LINES),
        ("a.txt", b"\n\n" + LINES),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES[:700]) + lzma.compress(LINES[700:])),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.ndjson.gz", gzip.compress(LINES)),
        ("a.jsonl.gzip", gzip.compress(LINES)),
        ("a.jsonl.zstd", zst(LINES)),
        ("a.jsonl", gzip.compress(LINES)),
        ("a", zst(LINES)),
        ("a.json.xz", lzma.compress(LINES)),
        ("a.pq", parquet(ROWS)),
    ],
)
def test_rows_are_recognized_by_their_content(tmp_path, name, content):
    write(tmp_path, {name: content})
    expected = ROWS if len(content) != len(jsonl(ROWS[:1])) else ROWS[:1]
    assert read(tmp_path / name) == expected
    assert read(tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        "BZhang: text\n",
        "PAR1 = 3\n",
        '{"a": 1,\n "b": 2}',
        '{"name": "one line"}',
        "{x}\n{y}\n",
        '{"a": 1}\ntext',
        "[1]\n[2]\n",
        "{" * 200_000,
    ],
)
def test_text_that_begins_like_another_format_is_text(tmp_path, content):
    assert read(write(tmp_path, {"a.txt": content})) == [content]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zst])
def test_compressed_text_is_text(tmp_path, compress):
    line = "zeile ä\n" * 1000
    text = line * (3 * BLOCK_BYTES // len(line.encode()))
    found = read(write(tmp_path, {"a.txt.x": compress(text.encode())}))
    assert len(found) == 3
    assert "".join(found) == text
    broken = write(tmp_path / "broken", {"a.txt.x": compress(os.urandom(1 << 15).hex().encode())[:-200]})
    with pytest.raises(ConfigError, match=r"a\.txt\.x: the data is corrupt after line 1 .*; replace the file"):
        read(broken)


def test_a_long_window_of_zstandard_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = bytearray(compressor.compress(LINES) + compressor.flush())
    assert zstandard.get_frame_parameters(bytes(frame)).window_size == 1 << 31
    assert read(write(tmp_path, {"a.jsonl.zst": bytes(frame)})) == ROWS
    frame[5] += 8  # the byte of the window's size
    with pytest.raises(
        ConfigError, match=r"zst cannot be read \(its window is longer than 2 GiB: compress it with zstd"
    ):
        read(write(tmp_path, {"a.jsonl.zst": bytes(frame)}))


def offsets_file(samples: list[bytes]) -> bytes:
    """Returns the layout of MDS and LitData: the number of samples, their offsets and the size, and the samples."""
    ends = [4 * (len(samples) + 2)]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    return struct.pack(f"<{len(ends) + 1}I", len(samples), *ends) + b"".join(samples)


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def feather() -> bytes:
    buffer = io.BytesIO()
    pyarrow.feather.write_feather(pyarrow.table({"text": ROWS}), buffer, compression="uncompressed")
    return buffer.getvalue()


SHARD = offsets_file([b"\7\0" * 60] * 8)
FOREIGN = [
    ("mds", {"shard.00000.mds": SHARD, "index.json": '{"shards": [{"format": "mds"}], "version": 2}'}, "MDS"),
    ("mds", {"shard.00000.mds.zstd": zst(SHARD), "index.json": "{}"}, "MDS"),
    ("mds", {"shard.00000": SHARD, "index.json": "{}"}, "MDS"),
    ("litdata", {"chunk-0-0.bin": SHARD, "index.json": '{"chunks": [], "config": {}}'}, "LitData"),
    ("litdata", {"chunk-0-0.zstd.bin": zst(SHARD), "index.json": '{"chunks": [], "config": {}}'}, "LitData"),
    ("litdata", {"renamed.bin": SHARD, "index.json": '{"chunks": [], "config": {}}'}, "LitData"),
    (
        "datatrove",
        {"0.ds": b"\7\0" * 500, "0.ds.index": b"\1" + bytes(7), "0.ds.metadata": "t.json|2\n5\n"},
        "datatrove",
    ),
    ("datatrove", {"0.ds.metadata": "t.json|2\n5\n"}, "datatrove"),
    ("tar", {"a-000000.tar": tar({"0.txt": b"text"}), "b.txt": PROSE}, "WebDataset"),
    ("tar", {"shard": tar({"0.txt": b"text"}), "b.txt": PROSE}, "WebDataset"),
    ("tar", {"shard.gz": gzip.compress(tar({"0.txt": b"text"})), "b.txt": PROSE}, "WebDataset"),
    ("table", {"a.csv.gz": gzip.compress(b"1,2"), "b.txt": PROSE}, "is a table"),
    ("table", {"a.parquet.gz": gzip.compress(parquet(ROWS)), "b.txt": PROSE}, "a compressed parquet file"),
    ("table", {"a.arrow.1": feather(), "b.txt": PROSE}, "Arrow or Feather"),
    ("records", {"a.tfrecord-00000-of-00001": b"\7\0\0\0\0\0\0\0text", "b.txt": PROSE * 100}, "TFRecord"),
    ("lz4", {"a.jsonl.lz4": b"\x04\x22\x4d\x18rest", "b.txt": PROSE * 100}, "compressed"),
    ("lz4", {"a.jsonl": b"\x04\x22\x4d\x18rest", "b.txt": PROSE * 100}, "LZ4"),
    ("brotli", {"a.jsonl.br": b"\x0b\x02\x80", "b.txt": PROSE * 100}, "compressed"),
    ("warc", {"a.warc.gz": gzip.compress(b"WARC/1.0\r\n"), "b.txt": PROSE * 100}, "web archive"),
    ("warc", {"a": gzip.compress(b"WARC/1.0\r\n"), "b.txt": PROSE * 100}, "web archive"),
    ("utf16", {"a.txt": PROSE.encode("utf-16"), "b.txt": PROSE * 100}, "UTF-16, not UTF-8; convert it with `iconv -f"),
    ("utf16", {"a.txt": PROSE.encode("utf-16-be"), "b.txt": PROSE * 100}, "`iconv -f UTF-16BE -t"),
    ("utf16", {"a.jsonl": LINES.decode().encode("utf-16"), "b.txt": PROSE * 100}, "UTF-16"),
    ("utf16", {"a.txt.gz": gzip.compress(PROSE.encode("utf-16-le")), "b.txt": PROSE * 100}, "`iconv -f UTF-16LE"),
    ("utf32", {"a.txt": PROSE.encode("utf-32"), "b.txt": PROSE * 100}, "UTF-32"),
]


@pytest.mark.parametrize(("files", "expected"), [(files, expected) for _, files, expected in FOREIGN])
def test_a_format_that_is_not_read_is_named(tmp_path, files, expected):
    folder = write(tmp_path / "data", files)
    with pytest.raises(ConfigError) as error:
        open_corpus(folder, cache=tmp_path / "cache")
    assert expected in str(error.value)
    assert str(folder) in str(error.value)
    name = next(iter(files))
    with pytest.raises(ConfigError) as error:
        open_corpus(folder / name, cache=tmp_path / "cache")
    assert expected in str(error.value)


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as found:
        found.writestr("a.jsonl", LINES)
    return buffer.getvalue()


UNREAD = [
    ("a.dat", b"\0" + bytes(range(256)), "is not text"),
    ("a.jsonl.zip", archive(), "is a zip archive"),
    ("a.npz", archive(), "is a zip archive"),
    ("pytorch_model.bin", archive(), "is a zip archive"),
    ("a.pdf", b"%PDF-1.7\ntext", "is a PDF document"),
    ("a.json", json.dumps([{"text": row} for row in ROWS]), "is JSON records"),
    ("a.json", json.dumps({"text": PROSE}, indent=1), "is JSON records"),
]


@pytest.mark.parametrize(("name", "content", "expected"), UNREAD)
def test_files_without_text_are_an_error_if_they_are_much(tmp_path, caplog, name, content, expected):
    content = content.encode() if isinstance(content, str) else content
    with pytest.raises(ConfigError) as error:
        read(write(tmp_path / "alone", {name: content}))
    assert expected in str(error.value)
    assert "the data is" not in str(error.value)
    rest = "x" * (99 * len(content))  # exactly a share of 1 %
    folder = write(tmp_path / "data", {name: content, "rest.txt": rest})
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        assert read(folder) == [rest]
    assert caplog.messages == [f"left out of {folder}: {name} (not text)"]
    (folder / "rest.txt").write_text(rest[:-1])
    with pytest.raises(ConfigError, match=r"1% of the bytes would be left out; .*move it"):
        read(folder)


def test_metadata_beside_rows_is_left_out(tmp_path, caplog):
    """As in a dataset of the hub and in what Spark writes."""
    metadata = {"README.md": "# Data", "dataset_infos.json": '{"default": {}}', "LICENSE": "MIT", "_SUCCESS": ""}
    rows = {"data/a.parquet": parquet(ROWS[:7]), "data/b.jsonl": jsonl(ROWS[7:])}
    folder = write(tmp_path / "data", {**metadata, **rows, "data/_metadata": parquet([])})
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        assert read(folder) == ROWS
    (message,) = caplog.messages
    assert (
        message == f"left out of {folder}: LICENSE, README.md, _SUCCESS, data/_metadata, dataset_infos.json (metadata)"
    )
    assert "README.md" in describe_source(Training(dataset_path=str(folder)))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        assert read(write(folder, {"data/c.txt": PROSE})) == [*ROWS, PROSE]
    assert caplog.messages[0].endswith("; read as plain text, beside files of rows: data/c.txt")
    with pytest.raises(ConfigError, match=r"big\.json is JSON, .* of the bytes would be left out"):
        read(write(folder, {"big.json": json.dumps({"data": [PROSE * 5000]}, indent=1)}))


def test_json_and_a_readme_among_text_are_text(tmp_path):
    """A folder of source code."""
    files = {"README.md": "# Code", "a.py": "x = 1", "package.json": '{"name": "x"}', "b.ipynb": '{\n "cells": []\n}'}
    assert sorted(read(write(tmp_path, files))) == sorted(files.values())


def test_what_is_left_out_is_said_once_at_every_start(tmp_path, python):
    """Also by a start that reuses the store; the files of the second are read once more for their hashes only."""
    write(tmp_path / "text", {"a.png": b"\x89PNG\0", "b.txt": PROSE, "c.jsonl.xz": lzma.compress(LINES)})
    options = ["--training.dataset_path=text", "--data.cache_folder=cache", "--training.seq_len=16"]
    command = [python, ROOT / "scripts/inspect_data.py", "documents", "--data.prepare_processes=1", *options]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        said = done.stdout + done.stderr
        assert said.count("a.png") == 1, said
        assert "left out of text: a.png (not text); read as plain text, beside files of rows: b.txt" in said
        assert "read from b.txt, c.jsonl.xz" in said


@pytest.mark.parametrize("other", [{"a.png": b"\x89PNG\0"}, {"a.dat": b"\7\0"}])
def test_json_documents_beside_no_text_are_an_error(tmp_path, other):
    """An index or metadata whose data has been moved."""
    with pytest.raises(ConfigError, match=r"index\.json \(and 1 more\) is JSON, of which brackets and keys"):
        read(write(tmp_path, {"index.json": json.dumps({"shards": [3] * 500}), **other}))


@pytest.mark.parametrize(
    ("name", "content", "is_same"),
    [
        ("a.jsonl", LINES, True),
        ("a.jsonl.gz", gzip.compress(LINES), True),
        ("a.json.zst", zst(LINES), True),
        ("a.txt", PROSE.encode(), True),
        ("a.ndjson", LINES, False),
        ("a.json", LINES, False),
        ("a.jsonl.xz", lzma.compress(LINES), False),
        ("a.jsonl.zstd", zst(LINES), False),
        ("a.json.bz2", bz2.compress(LINES), False),
    ],
)
def test_stores_of_the_first_version_are_reused_if_it_read_the_same(tmp_path, name, content, is_same):
    """Its fingerprint was that of names and contents; it read some files as text, and others not at all."""
    source = find_source(Training(dataset_path=str(write(tmp_path / "data", {name: content}))))
    entry = (name, len(content), hashlib.sha256(content).hexdigest())
    found = source_fingerprint(source, listing=tmp_path / "files.json")
    assert (found == digest_of([[entry], "text"])) == is_same
