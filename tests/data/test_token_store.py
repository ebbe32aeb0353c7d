"""A token store has every document once, is made once, and is complete or does not exist."""

import gzip
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from tests.data.corpora import (
    TOKENIZER,
    files_below,
    jsonl,
    open_corpus,
    parquet,
    prepare_parts,
    prepare_store,
    texts,
    write,
    write_corpus,
)
from tests.data.loaders import train_loader, validation_loader
from tests.data.processes import children, is_alive, wait_for
from tests.data.test_tokenizer import MADE, stored, word_level
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import build_tokenizer, open_dataset
from torchtitan_clone.data.sources import find_source
from torchtitan_clone.data.token_store import is_held_out

# tests.support.harness starts this server with torch loaded.
PROCESSES = multiprocessing.get_context("forkserver")
LATER = ("_bytes", "special_tokens")
"""Ends of the names of counts that stores of older versions lack."""


def prepare_logging(path: Path, *, cache: Path, log: Path) -> None:
    """Opens the dataset, and logs to a file."""
    logging.basicConfig(level=logging.INFO, filename=log)
    open_corpus(path, cache=cache)


def start_preparing(path: Path, *, cache: Path, log: Path) -> multiprocessing.Process:
    """Starts a process that opens the dataset."""
    process = PROCESSES.Process(target=prepare_logging, args=(path,), kwargs={"cache": cache, "log": log})
    process.start()
    return process


def wait_for_exit(process: multiprocessing.Process) -> int | None:
    """Returns the exit code of a process."""
    process.join()
    return process.exitcode


def documents(store, split) -> list[list[int]]:
    """Returns the token ids of each document of a split."""
    tokens = store.tokens(split)
    offsets = store.offsets(split)
    return [tokens[start:end].tolist() for start, end in itertools.pairwise(offsets)]


def versions(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the inode and the time of last modification of everything below a folder."""
    status = {name: (folder / name).stat() for name in files_below(folder)}
    return {name: (found.st_ino, found.st_mtime_ns) for name, found in status.items()}


def test_splits_have_every_document_in_order_with_eos(tmp_path, corpus):
    store = open_corpus(corpus, cache=tmp_path / "cache").store
    # In the order of the files: a.jsonl, b/..., c.parquet, d/...
    rows = texts(300)
    for split in ("train", "validation"):
        expected = [row for row in rows if is_held_out(row, fraction=0.1) == (split == "validation")]
        encoded = [[*ids, TOKENIZER.eos_id] for ids in TOKENIZER.encode_batch(expected)]
        assert documents(store, split) == encoded
    assert 10 < store.meta.documents["validation"] < 60
    assert store.tokens("train").dtype == np.uint16


@pytest.mark.parametrize("name", [*MADE, "token ids"])
def test_a_store_knows_the_bytes_of_its_text(tmp_path, name, caplog):
    """Bits per byte must not depend on the tokenizer, whose tokens are not always what the text has."""
    made = MADE.get(name, MADE["word_piece"])
    tokenizer = build_tokenizer(stored(tmp_path / "t", made()))
    found = [f"{text} \u6f22\u5b57" for text in texts(300, words=20)]
    if name == "token ids":
        folder = write(
            tmp_path / "data",
            {"a.parquet": parquet(tokenizer.encode_batch(found), kind=pyarrow.list_(pyarrow.int32()))},
        )
    else:
        folder = write(tmp_path / "data", {"a.jsonl": jsonl(found[:100]), "b.jsonl": jsonl(found[100:])})
    data = Data(cache_folder=str(tmp_path / "cache"), held_out_fraction=0.3, prepare_processes=1)
    source = find_source(Training(dataset_path=str(folder)))
    prepare = partial(prepare_store, source, tokenizer=tokenizer, data=data)
    store = prepare(part_bytes=1)
    lengths = np.array(tokenizer.byte_lengths())
    for split in ("train", "validation"):
        texts_of_split = [text for text in found if is_held_out(text, fraction=0.3) == (split == "validation")]
        counted = lengths[np.asarray(store.tokens(split)[: store.meta.tokens[split]])].sum()
        expected = 0 if name == "token ids" else sum(len(text.encode()) for text in texts_of_split)
        assert store.meta.text_bytes[split] == expected
        assert counted * store.byte_scale(split) == pytest.approx(expected or counted, rel=1e-12)
    meta = json.loads((store.folder / "meta.json").read_text())
    (store.folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if not k.endswith(LATER)}))
    assert "bits per byte" not in caplog.text
    old = prepare()
    assert (old.meta.text_bytes, old.byte_scale("train")) == ({}, 1.0)
    assert (f"its bits per byte are estimates; delete {store.folder} to" in caplog.text) == (name != "byte_level")


def test_parts_of_an_older_version_can_be_joined(tmp_path):
    """They have not counted the bytes of their text."""
    folder = write(tmp_path / "data", {"a.jsonl": jsonl(texts(100)), "b.jsonl": jsonl(texts(50, seed=1))})
    source = find_source(Training(dataset_path=str(folder)))
    given = {"tokenizer": TOKENIZER, "data": Data(cache_folder=str(tmp_path / "cache")), "part_bytes": 1}
    assert not prepare_parts(source, **given, task=0, tasks=2)
    (file,) = (tmp_path / "cache").glob("sources/*/parts/*/meta.json")
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in meta.items() if not key.endswith(LATER)}))
    store = prepare_store(source, **given)
    assert (store.meta.text_bytes, sum(store.meta.documents.values())) == ({}, 150)


def test_a_large_vocabulary_uses_four_bytes_per_token(tmp_path):
    folder = word_level(tmp_path, {"a": 0, "b": 70_000}, config={"eos_token": "<end>"})
    store = open_corpus(
        write(tmp_path / "text", {"a.txt": "b"}), cache=tmp_path / "cache", tokenizer=build_tokenizer(folder)
    ).store
    assert store.tokens("train").dtype == np.uint32
    assert store.tokens("train").tolist() == [70_000, 2]


def test_a_text_cannot_contain_the_separator_of_documents(tmp_path):
    text = "before<|end_of_text|>after"
    folder = write(tmp_path / "text", {"a.txt": text})
    store = open_corpus(folder, cache=tmp_path / "cache", held_out_fraction=0.0).store
    (ids,) = documents(store, "train")
    assert ids.index(TOKENIZER.eos_id) == len(ids) - 1
    assert TOKENIZER.decode(ids[:-1]) == text


def test_holding_out_leaves_at_least_one_training_document(tmp_path):
    folder = write(tmp_path / "one", {"a.txt": "only this"})
    everything = open_corpus(folder, cache=tmp_path / "cache", held_out_fraction=1.0).store
    assert everything.meta.documents == {"train": 1, "validation": 0}
    nothing = open_corpus(write_corpus(tmp_path / "corpus"), cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert nothing.meta.documents == {"train": 300, "validation": 0}


def test_few_documents_leave_one_for_validation(tmp_path):
    files = {f"{name}.txt": f"the text of document {name}" for name in "abcdef"}
    store = open_corpus(write(tmp_path / "text", files), cache=tmp_path / "cache", held_out_fraction=1e-6).store
    (held_out,) = documents(store, "validation")
    kept = documents(store, "train")
    assert len(kept) == 5
    assert held_out not in kept
    store = open_corpus(write(tmp_path / "text2", files), cache=tmp_path / "cache2", held_out_fraction=0).store
    assert (len(documents(store, "train")), len(documents(store, "validation"))) == (6, 0)


def test_a_second_start_reads_the_store_of_the_first(tmp_path, corpus):
    first = open_corpus(corpus, cache=tmp_path / "cache")
    before = versions(first.store.folder)
    second = open_corpus(corpus, cache=tmp_path / "cache")
    assert versions(second.store.folder) == before
    assert second.identity == first.identity


def test_the_standard_library_is_prepared_only_once(stdlib_cache):
    before = versions(stdlib_cache / "stores")
    dataset = open_dataset(training=Training(), data=Data(cache_folder=str(stdlib_cache)), tokenizer=TOKENIZER)
    assert versions(stdlib_cache / "stores") == before
    assert dataset.store.meta.tokens["train"] > 2_000_000
    assert dataset.store.meta.documents["validation"] > 0
    batch = next(train_loader(dataset, seq_len=2048))
    assert "def " in TOKENIZER.decode(batch.tokens_BT.flatten().tolist())
    assert list(validation_loader(dataset, seq_len=2048))


def test_different_settings_make_different_stores(tmp_path, corpus):
    folders = {
        open_corpus(corpus, cache=tmp_path / "cache").store.folder,
        open_corpus(corpus, cache=tmp_path / "cache", held_out_fraction=0.2).store.folder,
        open_corpus(
            corpus,
            cache=tmp_path / "cache",
            tokenizer=build_tokenizer(word_level(tmp_path, {"a": 0}, config={"eos_token": "<end>"})),
        ).store.folder,
    }
    assert len(folders) == 3


@pytest.mark.parametrize("size", [9_000, 1_500_000])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "folder/a.md"])
def test_the_end_of_the_only_text_is_held_out(tmp_path, name, size):
    """At the end of a line, also of a text that is several documents."""
    lines = [f"line {number} of the text\n" for number in range(size // 20)]
    content = "".join(lines).encode()
    path = write(tmp_path, {name: gzip.compress(content) if name.endswith(".gz") else content}) / name
    path = path.parent if "/" in name else path
    store = open_corpus(path, cache=tmp_path / "cache", held_out_fraction=0.02).store
    train, validation = ("".join(decoded(store, split)) for split in ("train", "validation"))
    assert train + validation == "".join(lines)
    assert validation.startswith("line ")
    assert 0 <= len(validation) - 0.02 * len(content) < 25
    assert store.meta.documents == {"train": -(-size // (1 << 20)), "validation": 1}
    everything = open_corpus(path, cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert everything.meta.documents["validation"] == 0
    assert everything.fingerprint != store.fingerprint


def decoded(store, split) -> list[str]:
    return [TOKENIZER.decode(ids[:-1]) for ids in documents(store, split)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_end_of_the_only_row_is_held_out(tmp_path, name):
    text = "a text without line ends " * 40
    files = {"a.jsonl": jsonl([text, ""]), "a.parquet": parquet([text])}
    store = open_corpus(write(tmp_path / "text", {name: files[name]}), cache=tmp_path / "cache").store
    assert decoded(store, "train") + decoded(store, "validation") == [text[:900], text[900:]]


def test_the_end_of_the_only_row_of_ids_is_held_out(tmp_path):
    ids = list(range(1, 201))
    write(tmp_path / "ids", {"a.parquet": parquet([ids], kind=pyarrow.list_(pyarrow.int32()))})
    store = open_corpus(tmp_path / "ids", cache=tmp_path / "cache").store
    assert documents(store, "train") == [[*ids[:180], TOKENIZER.eos_id]]
    assert documents(store, "validation") == [[*ids[180:], TOKENIZER.eos_id]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.bin"])
def test_a_store_that_holds_out_nothing_of_its_only_document_is_made_again(tmp_path, name):
    """Older versions made such stores, of which validation said that they have 0 tokens in 0 documents."""
    content = {
        "a.jsonl": jsonl(["a text without line ends " * 40]),
        "a.bin": np.arange(1, 201, dtype="uint16").tobytes(),
    }
    corpus, cache = write(tmp_path / "corpus", {name: content[name]}), tmp_path / "cache"
    complete = open_corpus(corpus, cache=cache, held_out_fraction=0.0).store
    store = open_corpus(corpus, cache=cache).store
    assert store.meta.documents == {"train": 1, "validation": 1}
    shutil.rmtree(store.folder)
    shutil.copytree(complete.folder, store.folder)
    meta = json.loads((store.folder / "meta.json").read_text())
    (store.folder / "meta.json").write_text(json.dumps(meta | {"held_out_fraction": store.meta.held_out_fraction}))
    again = open_corpus(corpus, cache=cache).store
    assert again.meta.documents == store.meta.documents
    assert again.fingerprint != store.fingerprint
    assert again.folder == open_corpus(corpus, cache=cache).store.folder
    assert complete.folder == open_corpus(corpus, cache=cache, held_out_fraction=0.0).store.folder


def test_copies_of_one_document_are_all_trained_on(tmp_path):
    """Which the error about their validation says, without the remedies that change nothing."""
    dataset = open_corpus(write(tmp_path / "a", {"a.jsonl": jsonl(["x y"] * 3)}), cache=tmp_path / "cache")
    assert dataset.store.meta.documents == {"train": 3, "validation": 0}
    with pytest.raises(ConfigError, match=r"0 in 0 documents; .*validation\.enable to false, or add other documents"):
        dataset.num_rows("validation", seq_len=16)


def test_an_empty_source_is_an_error_and_leaves_no_store(tmp_path):
    folder = write(tmp_path / "empty", {"a.txt": "", "b.jsonl": b"\n\n"})
    with pytest.raises(ConfigError, match=r"no text in a\.txt, b\.jsonl of .*set training\.dataset_path"):
        open_corpus(folder, cache=tmp_path / "cache")
    assert not [name for name in files_below(tmp_path / "cache") if "partial" in name or "stores/" in name]


def test_bad_rows_are_errors_by_the_current_limit(tmp_path):
    path = write(tmp_path, {"a.jsonl": jsonl(texts(50)) + b"{\n{}\n"}) / "a.jsonl"
    with pytest.raises(ConfigError, match="1 unreadable"):
        open_corpus(path, cache=tmp_path / "cache")
    assert open_corpus(path, cache=tmp_path / "cache", max_bad_rows=2).store.meta.bad_rows == 2
    with pytest.raises(ConfigError, match=r"2 unreadable(.|\n)*a\.jsonl:52: no key"):
        open_corpus(path, cache=tmp_path / "cache", max_bad_rows=1)


@pytest.mark.parametrize("damage", ["train.tokens", "validation.offsets", "meta.json", "offset", "truncated meta"])
def test_a_corrupt_store_is_an_error_until_it_is_deleted(tmp_path, corpus, damage):
    folder = open_corpus(corpus, cache=tmp_path / "cache").store.folder
    if damage == "truncated meta":
        (folder / "meta.json").write_text((folder / "meta.json").read_text()[:40])
    elif damage == "offset":
        content = (folder / "train.offsets").read_bytes()
        (folder / "train.offsets").write_bytes(content[:-8] + bytes(8))
    elif damage == "train.tokens":
        os.truncate(folder / damage, 100)
    else:
        (folder / damage).unlink()
    with pytest.raises(ConfigError, match=rf"{folder} is corrupt .*delete that folder"):
        open_corpus(corpus, cache=tmp_path / "cache")
    shutil.rmtree(folder)
    open_corpus(corpus, cache=tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_folder = .*/file\": .* set it to a folder"):
        open_corpus(corpus, cache=tmp_path / "file")


def test_a_killed_preparation_leaves_no_files_behind(tmp_path):
    corpus = write(tmp_path, {"a.jsonl": jsonl(texts(30_000, words=200))}) / "a.jsonl"
    cache = tmp_path / "cache"
    process = start_preparing(corpus, cache=cache, log=tmp_path / "log")
    encoders = wait_for(lambda: list(cache.glob("sources/*/partial")) and children(process.pid))
    process.kill()
    assert wait_for_exit(process) == -signal.SIGKILL
    assert list(cache.glob("sources/*/partial"))
    assert not (cache / "stores").exists()
    wait_for(lambda: not any(is_alive(pid) for pid in encoders))
    smaller = jsonl(texts(500))
    corpus.write_bytes(smaller)
    prepared = open_corpus(corpus, cache=cache)
    assert sum(prepared.store.meta.documents.values()) == 500
    fresh = open_corpus(corpus, cache=tmp_path / "fresh")
    assert files_below(cache) == files_below(tmp_path / "fresh")
    for name in ("train.tokens", "train.offsets", "validation.tokens", "validation.offsets", "meta.json"):
        assert (prepared.store.folder / name).read_bytes() == (fresh.store.folder / name).read_bytes()


def test_two_processes_share_one_preparation(tmp_path):
    corpus = write(tmp_path, {"a.jsonl": jsonl(texts(4000))}) / "a.jsonl"
    logs = [tmp_path / "log0", tmp_path / "log1"]
    processes = [start_preparing(corpus, cache=tmp_path / "cache", log=log) for log in logs]
    assert [wait_for_exit(process) for process in processes] == [0, 0]
    assert sorted("prepared" in log.read_text() for log in logs) == [False, True]
    assert sum(open_corpus(corpus, cache=tmp_path / "cache").store.meta.documents.values()) == 4000


def test_two_copies_can_be_prepared_at_the_same_time(tmp_path):
    corpora = [write(tmp_path / name, {"a.jsonl": jsonl(texts(4000))}) for name in ("one", "two")]
    processes = [start_preparing(corpus, cache=tmp_path / "cache", log=tmp_path / "log") for corpus in corpora]
    assert [wait_for_exit(process) for process in processes] == [0, 0]
    assert len(list((tmp_path / "cache" / "stores").iterdir())) == 1
    assert not list((tmp_path / "cache").glob("sources/*/partial"))
