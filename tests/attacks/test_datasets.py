"""Hostile data files and token stores: one clear error each, in bounded memory, and no read that blocks.

Reads with torchtitan_clone/data/sources.py, torchtitan_clone/data/token_store.py, torchtitan_clone/data/loader.py and
torchtitan_clone/data/encoder.py.
"""

import gzip
import json
import logging
import os
import resource
import shutil
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer, models

from tests.data.corpora import TOKENIZER, jsonl, open_corpus, parquet, texts, write, write_corpus, zst
from tests.support.harness import run_ranks
from tests.support.runs import exit_codes, options
from torchtitan_clone.checkpoint.progress import check_position
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data import Loader, LoaderOptions, build_tokenizer
from torchtitan_clone.data.dataset import StreamState
from torchtitan_clone.data.opening import describe_source
from torchtitan_clone.data.sources import (
    DOCUMENT_BYTES,
    EMPTY_ROWS,
    LINE_BYTES,
    BadRows,
    find_source,
    read_documents,
)
from torchtitan_clone.data.streaming import streams_from_plain, streams_to_plain
from torchtitan_clone.documents import DocumentError, Value

MIB = 1 << 20


@pytest.fixture
def half_a_gibibyte():
    """Lets this process allocate 512 MiB more than it has, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 512 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read(path, *, max_bad_rows=0, text_key="text"):
    """Returns the number of characters of each document at a path."""
    source = find_source(Training(dataset_path=str(path), text_key=text_key))
    return [len(text) for text, _ in read_documents(source, bad_rows=BadRows(limit=max_bad_rows))]


def members(piece, *, count, first=b"", last=b""):
    """Returns a gzip file of `count` times the piece, compressed once."""
    return gzip.compress(first) + gzip.compress(piece) * count + gzip.compress(last)


def frame(piece, *, count, first=b""):
    """Returns one zstandard frame of `count` times the piece."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(first) + b"".join(stream.compress(piece) for _ in range(count)) + stream.flush()


def bind(path):
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket has at most 107 bytes
        server.bind(path.name)
        os.chdir(before)


def sparse(path):
    path.write_bytes(b"text\n")
    os.truncate(path, 1 << 40)


SPECIAL_FILES = {
    "pipe.txt": (os.mkfifo, "not a regular file"),
    "pipe.jsonl": (os.mkfifo, "not a regular file"),
    "pipe.parquet": (os.mkfifo, "not a regular file"),
    "socket.txt": (bind, "not a regular file"),
    "zero.txt": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "lost.txt": (lambda path: path.symlink_to("nowhere"), "cannot be read"),
    "loop.txt": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "sparse.txt": (sparse, "almost empty"),
    "table.csv": (lambda path: path.write_text("id,text\n1,x\n"), "is a table.*convert it to .jsonl or .parquet"),
    "TABLE.TSV.gz": (lambda path: path.write_bytes(gzip.compress(b"id\ttext\n")), "is a table"),
}


@pytest.mark.parametrize("name", SPECIAL_FILES)
def test_a_file_that_holds_no_text_is_refused_at_once(tmp_path, name):
    make, complaint = SPECIAL_FILES[name]
    make(write(tmp_path / "data", {"a.txt": "text"}) / name)
    for path in (tmp_path / "data", tmp_path / "data" / name):
        with pytest.raises(ConfigError, match=rf"training\.dataset_path = .*({complaint}|no such file)"):
            describe_source(Training(dataset_path=str(path)))


def test_all_files_that_cannot_be_read_are_named_together(tmp_path):
    folder = write(tmp_path, {"a.csv": "1", "b.txt": "x", "c.tsv": "2", "d.tar": "3"})
    with pytest.raises(ConfigError) as error:
        describe_source(Training(dataset_path=str(folder)))
    table, archive = error.value.messages
    assert "a.csv (and 1 more) is a table" in table
    assert "d.tar is a tar archive" in archive


def test_a_link_to_a_regular_file_is_read(tmp_path):
    write(tmp_path, {"elsewhere/x": "text", "data/a.txt": "other"})
    (tmp_path / "data" / "b.txt").symlink_to("../elsewhere/x")
    assert read(tmp_path / "data") == [5, 4]
    assert open_corpus(tmp_path / "data", cache=tmp_path / "cache").store.meta.documents["train"] == 1


def test_a_path_that_is_too_long_is_an_error():
    with pytest.raises(ConfigError, match="no such file or folder"):
        describe_source(Training(dataset_path="x" * 5000))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_line_of_200_mb_is_one_error_with_its_place(tmp_path, half_a_gibibyte, name):
    with (tmp_path / name).open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(200):
            file.write(b"a" * MIB)
        file.write(b'"}\n{"text": "last"}\n')
    with pytest.raises(ConfigError, match=rf"{name}:2: a (line|text) of more than [0-9,]+ bytes"):
        read(tmp_path)
    # It can be skipped like any other bad row; a text file is cut at the ends of lines.
    assert read(tmp_path, max_bad_rows=1)[-1] in (4, len('{"text": "last"}\n'))


def test_the_longest_accepted_text(tmp_path):
    """On both sides of the limit; a row may take six bytes for each."""
    lines = [b'{"text": "%s"}\n' % (b"a" * DOCUMENT_BYTES), b'{"text": "%s"}\n' % (b"a" * (DOCUMENT_BYTES + 1))]
    assert read(write(tmp_path, {"a.jsonl": b"".join(lines)}), max_bad_rows=1) == [DOCUMENT_BYTES]
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: a text of more than {DOCUMENT_BYTES:,} bytes"):
        read(tmp_path)
    assert LINE_BYTES == 4 * DOCUMENT_BYTES


BOMBS = {
    "line.jsonl.gz": lambda: members(b"a" * (16 * MIB), count=320, first=b'{"text": "'),
    "line.jsonl.zst": lambda: frame(b"a" * MIB, count=2048, first=b'{"text": "'),
    "brackets.jsonl.gz": lambda: members(b"[" * (16 * MIB), count=64),
    "empty.jsonl.gz": lambda: members(b"\n" * (16 * MIB), count=320),
    "empty.jsonl.zst": lambda: frame(b"\n" * MIB, count=2048),
    "texts.jsonl.gz": lambda: members(b'{"text": ""}\n' * MIB, count=64),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_becomes_gigabytes_is_one_error(tmp_path, request, name):
    write(tmp_path, {name: BOMBS[name]()})
    assert (tmp_path / name).stat().st_size < 12 * MIB
    request.getfixturevalue("half_a_gibibyte")
    with pytest.raises(ConfigError, match=rf"{name}(:1: a line of more than|: {EMPTY_ROWS:,} rows without text)"):
        read(tmp_path)


def test_equal_large_values_of_a_parquet_file_fit_into_memory(tmp_path, half_a_gibibyte):
    """The file stores one of the values; all of them take 8 GiB."""
    large = pyarrow.array(["a" * (8 * MIB)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1024, pyarrow.int32()), large)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", store_schema=False)
    source = find_source(Training(dataset_path=str(tmp_path)))
    documents = read_documents(source, bad_rows=BadRows(limit=0))
    assert [len(next(documents)[0]) for _ in range(20)] == [8 * MIB] * 20


HOSTILE_ROWS = {
    "nested": (b'{"text": ' + b"[" * 200_000, "recursion"),
    "digits": (b'{"n": %s, "text": "x"}' % (b"9" * 5000), "digits"),
    "keys": (json.dumps(dict.fromkeys(map(str, range(100_000)))).encode(), "no key 'text'"),
    "escape": (b'{"a\\u001b[31m\\n": 1}', "no key 'text'"),
    "list": (b"[1]", "not a JSON object but a list"),
    "1e400": (b'{"text": 1e400}', "holds a number"),
}


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_a_hostile_row_is_one_error_of_one_line(tmp_path, name):
    row, complaint = HOSTILE_ROWS[name]
    write(tmp_path, {"a.jsonl": jsonl(["x"]) + row + b"\n"})
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{complaint}") as error:
        read(tmp_path)
    assert len(str(error.value)) < 1500
    assert "\033" not in str(error.value)
    assert "sys." not in str(error.value)
    assert read(tmp_path, max_bad_rows=1) == [1]


def test_names_in_errors_cannot_forge_lines(tmp_path):
    write(tmp_path, {"a\nerror: forged\033[31m.jsonl": b"{"})
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    assert "\nerror: forged" not in str(error.value)
    assert "\033" not in str(error.value)


@pytest.mark.parametrize(
    "column",
    [[1, 2], [["x"]], [{"text": "x"}], [b"x"], [1.5], [True], [None]],
    ids=["int", "list", "struct", "binary", "float", "bool", "null"],
)
def test_a_parquet_column_of_another_type_is_an_error(tmp_path, column):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="not strings"):
        read(tmp_path)


def test_two_parquet_columns_of_one_name_are_an_error(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="several such columns"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_other_content_than_the_name_says_is_an_error(tmp_path, name):
    contents = [b"", b"x", jsonl(texts(5)), os.urandom(1000), b"PAR1" + bytes(100) + b"PAR1", parquet(texts(5))[:-4]]
    for content in contents + ([zst(jsonl(texts(5)))] if name.endswith("gz") else [gzip.compress(jsonl(texts(5)))]):
        write(tmp_path, {name: content})
        if content or name.endswith("parquet"):
            with pytest.raises(ConfigError, match=f"{name}: the data is corrupt"):
                read(tmp_path)


def test_c4_test_is_the_shipped_corpus_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        for _ in range(3):
            assert find_source(Training(dataset="c4_test")) == find_source(Training())
    assert [record.message.count('"c4_test"') for record in caplog.records] == [1]


# ------------------------------------------------------------------ token stores and positions


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Returns a folder with a corpus, its cache with one store, and an equal cache of another corpus."""
    folder = tmp_path_factory.mktemp("store")
    for name, seed in (("corpus", 0), ("other", 1)):
        write_corpus(folder / name, count=60, seed=seed)
        open_corpus(folder / name, cache=folder / f"{name}_cache")
    return folder


def change_meta(folder, **values):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | values))


def swap(folder, a, b):
    first, second = (folder / a).read_bytes(), (folder / b).read_bytes()
    (folder / a).write_bytes(second)
    (folder / b).write_bytes(first)


def other_store(folder):
    (other,) = (folder.parents[2] / "other_cache" / "stores").iterdir()
    return other


def replace(path, make):
    path.unlink()
    make(path)


STORES = {
    "meta is deep": lambda f: (f / "meta.json").write_text("[" * 200_000),
    "meta is a list": lambda f: (f / "meta.json").write_text("[]"),
    "meta is a pipe": lambda f: replace(f / "meta.json", os.mkfifo),
    "tokens are a pipe": lambda f: replace(f / "train.tokens", os.mkfifo),
    "tokens are a link": lambda f: replace(
        f / "train.tokens", lambda path: path.symlink_to(shutil.copy(f / "../train", f.parents[1]))
    ),
    "an unknown key": lambda f: change_meta(f, more=1),
    "a negative count": lambda f: change_meta(f, tokens={"train": -1, "validation": 0}),
    "a count of 2**70": lambda f: change_meta(f, tokens={"train": 2**70, "validation": 0}),
    "a list of counts": lambda f: change_meta(f, documents=[1, 2]),
    "bad rows as text": lambda f: change_meta(f, bad_rows="0"),
    "another eos": lambda f: change_meta(f, eos_id=7),
    "another vocabulary": lambda f: change_meta(f, vocab_size=2**20),
    "the store of another corpus": lambda f: (shutil.rmtree(f), shutil.copytree(other_store(f), f)),
    "the tokens of others": lambda f: (f / "train.tokens").write_bytes(
        (f / "train.tokens").read_bytes()[:-2][::-1].ljust((f / "train.tokens").stat().st_size, b"\0")
    ),
    "offsets that decrease": lambda f: (f / "train.offsets").write_bytes(
        bytes(8) + (f / "train.offsets").read_bytes()[8:-8][::-1] + (f / "train.offsets").read_bytes()[-8:]
    ),
}


@pytest.mark.parametrize("damage", STORES.values(), ids=STORES)
def test_a_hostile_token_store_is_one_error(tmp_path, store, damage):
    cache = shutil.copytree(store / "corpus_cache", tmp_path / "cache")
    shutil.copytree(store / "other_cache", tmp_path / "other_cache")
    (folder,) = (cache / "stores").iterdir()
    shutil.copy(folder / "train.tokens", folder.parent / "train")
    open_corpus(store / "corpus", cache=cache)
    damage(folder)
    with pytest.raises(ConfigError, match=r"is corrupt \(.*delete that folder") as error:
        open_corpus(store / "corpus", cache=cache)
    assert len(str(error.value)) < 1000


def test_a_hostile_list_of_hashes_is_made_again(tmp_path, store):
    cache = shutil.copytree(store / "corpus_cache", tmp_path / "cache")
    (listing,) = (cache / "sources").glob("*/files.json")
    before = json.loads(listing.read_text())
    for content in ("[]", '{"a": 3}', "[" * 200_000, json.dumps({name: [1, "x", 3] for name in before})):
        listing.write_text(content)
        open_corpus(store / "corpus", cache=cache)
        assert json.loads(listing.read_text()) == before
    replace(listing, os.mkfifo)
    replace(listing.with_name("lock"), os.mkfifo)
    open_corpus(store / "corpus", cache=cache)


@pytest.mark.parametrize(
    "change",
    [{"samples": value} for value in (None, "1", -1, 1.5, 2**70, True)]
    + [{"cursors": value, "bookmark": [0, 0, None]} for value in ([], 3, [[1, 2]], [[0, 0, -1]], [["a", 0, 0]])]
    + [{"cursors": [[0, 0, 0]], "bookmark": value} for value in ([0, 0], [0, 0, 3], [-1, 0, None], [2**70, 0, None], 5)]
    + [{"streams": value} for value in (3, [5], [{"cursors": [[0, 0, 0]], "bookmark": 5}])],
)
def test_a_damaged_position_in_the_data_is_an_error(store, change):
    dataset = open_corpus(store / "corpus", cache=store / "corpus_cache")
    loader = Loader(dataset, options=LoaderOptions(seq_len=16, document_masking=True), seed=0, global_batch_size=1)
    state = loader.state_dict() | change
    with pytest.raises(ConfigError, match="the position in the data that the checkpoint holds is damaged"):
        loader.load_state_dict(state, allow_change=True)
    with pytest.raises(DocumentError):
        check_position(Value(state, where="data"))


def test_a_position_is_read_as_it_was_written():
    state = StreamState(cursors=[(0, 1, 2), (0, 3, 4)], bookmark=(0, 1, '{"a": 1}'))
    assert streams_from_plain(json.loads(json.dumps(streams_to_plain([state])))) == [state]
    with pytest.raises(DocumentError):
        streams_from_plain({"cursors": [[0, 0, 0]], "bookmark": [0, 0, None, 1]})


def test_a_tokenizer_that_cannot_encode_a_text_is_one_error(tmp_path):
    """Its vocabulary has no token for unknown words."""
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unknown>"))
    backend.add_special_tokens(["<end>"])
    write(tmp_path, {"t/tokenizer.json": backend.to_str(), "t/tokenizer_config.json": '{"eos_token": "<end>"}'})
    write(tmp_path, {"data/a.txt": "b"})
    with pytest.raises(ConfigError, match=r"cannot be tokenized: the tokenizer failed: .*model\.hf_assets_path"):
        open_corpus(tmp_path / "data", cache=tmp_path / "cache", tokenizer=build_tokenizer(str(tmp_path / "t")))
    assert open_corpus(tmp_path / "data", cache=tmp_path / "cache", tokenizer=TOKENIZER)


# ------------------------------------------------------------------ a run


def test_runs_refuse_hostile_data_before_they_start(tmp_path):
    folders = [tmp_path / str(number) for number in range(5)]
    os.mkfifo(write(folders[0], {"a.txt": "x"}) / "b.txt")
    write(folders[1], {"a.csv": "id,text\n1,x\n"})
    write(folders[2], {"a.jsonl.gz": BOMBS["line.jsonl.gz"]()})
    write(folders[3], {"a.txt": b"a" * (200 * MIB)})
    write(folders[4], {"a.parquet": b"PAR1"})
    cases = [options(folder, tmp_path / "runs", data__cache_folder=tmp_path / "cache") for folder in folders]
    ((*results,),) = run_ranks(exit_codes, 1, cases, tmp_path / "log")
    for code, output in results:
        assert code == 2, output
        assert output.count("error: ") == 1
        assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()
