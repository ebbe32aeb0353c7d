"""Token stores: what is in them, that they are made once, and what becomes of damage, death and company."""

import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import TOKENIZER, files_below, jsonl, opened, texts, write, write_corpus
from tests.data.test_tokenizer import word_level
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Data, Training
from torchtitan_clone.data import build_tokenizer, open_dataset
from torchtitan_clone.data.token_store import is_held_out

PROCESSES = multiprocessing.get_context(
    "forkserver"
)  # of which torchtitan_clone.testing.harness has one with torch loaded


def prepare_logging(path: Path, *, cache: Path, log: Path) -> None:
    """Opens the dataset, with its log in a file."""
    logging.basicConfig(level=logging.INFO, filename=log)
    opened(path, cache=cache)


def start_preparing(path: Path, *, cache: Path, log: Path) -> multiprocessing.Process:
    """A process of its own that opens the dataset."""
    process = PROCESSES.Process(target=prepare_logging, args=(path,), kwargs={"cache": cache, "log": log})
    process.start()
    return process


def finished(process: multiprocessing.Process) -> int | None:
    """Its exit code."""
    process.join(60)
    return process.exitcode


def documents(store, split) -> list[list[int]]:
    """Token ids of each document of a split."""
    tokens, offsets = store.tokens(split), store.offsets(split)
    return [tokens[start:end].tolist() for start, end in itertools.pairwise(offsets)]


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def test_every_document_is_in_one_split_in_order_and_ends_with_eos(tmp_path, corpus):
    store = opened(corpus, cache=tmp_path / "cache").store
    # In the order of the files: a.jsonl, b/..., c.parquet, d/...
    rows = texts(300)
    for split in ("train", "validation"):
        expected = [row for row in rows if is_held_out(row, fraction=0.1) == (split == "validation")]
        encoded = [[*ids, TOKENIZER.eos_id] for ids in TOKENIZER.encode_batch(expected)]
        assert documents(store, split) == encoded
    assert 10 < store.meta.documents["validation"] < 60
    assert store.tokens("train").dtype == np.uint16


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    folder = word_level(tmp_path, {"a": 0, "b": 70_000}, config={"eos_token": "<end>"})
    store = opened(
        write(tmp_path / "text", {"a.txt": "b"}), cache=tmp_path / "cache", tokenizer=build_tokenizer(folder)
    ).store
    assert store.tokens("train").dtype == np.uint32
    assert store.tokens("train").tolist() == [70_000, 2]


def test_a_text_cannot_end_its_document_early(tmp_path):
    text = "before<|end_of_text|>after"
    store = opened(write(tmp_path / "text", {"a.txt": text}), cache=tmp_path / "cache").store
    (ids,) = documents(store, "train")
    assert ids.index(TOKENIZER.eos_id) == len(ids) - 1
    assert TOKENIZER.decode(ids[:-1]) == text


def test_holding_out_leaves_something_to_train_on(tmp_path):
    folder = write(tmp_path / "one", {"a.txt": "only this"})
    everything = opened(folder, cache=tmp_path / "cache", held_out_fraction=1.0).store
    assert everything.meta.documents == {"train": 1, "validation": 0}
    nothing = opened(write_corpus(tmp_path / "corpus"), cache=tmp_path / "cache", held_out_fraction=0.0).store
    assert nothing.meta.documents == {"train": 300, "validation": 0}


def test_few_documents_still_leave_one_to_validate_on(tmp_path):
    files = {f"{name}.txt": f"the text of document {name}" for name in "abcdef"}
    store = opened(write(tmp_path / "text", files), cache=tmp_path / "cache", held_out_fraction=1e-6).store
    (held_out,) = documents(store, "validation")
    kept = documents(store, "train")
    assert len(kept) == 5
    assert held_out not in kept
    store = opened(write(tmp_path / "text2", files), cache=tmp_path / "cache2", held_out_fraction=0).store
    assert (len(documents(store, "train")), len(documents(store, "validation"))) == (6, 0)


def test_a_second_start_reads_what_the_first_made(tmp_path, corpus):
    first = opened(corpus, cache=tmp_path / "cache")
    before = (first.store.folder / "train.tokens").stat()
    second = opened(corpus, cache=tmp_path / "cache")
    assert (second.store.folder / "train.tokens").stat() == before
    assert second.identity == first.identity


def test_the_standard_library_starts_fast_once_prepared(stdlib_cache):
    training, data = Training(), Data(cache_folder=str(stdlib_cache))
    open_dataset(training=training, data=data, tokenizer=TOKENIZER)
    start = time.perf_counter()
    store = open_dataset(training=training, data=data, tokenizer=TOKENIZER).store
    assert time.perf_counter() - start < 0.3
    assert store.meta.tokens["train"] > 2_000_000
    assert store.meta.documents["validation"] > 0


def test_the_fingerprint_is_of_content_not_of_place(tmp_path, corpus):
    here = opened(corpus, cache=tmp_path / "cache")
    there = opened(Path(shutil.copytree(corpus, tmp_path / "elsewhere")), cache=tmp_path / "cache")
    assert there.identity == here.identity
    assert there.store.folder == here.store.folder


@pytest.mark.parametrize("change", ["content", "name", "more", "less"])
def test_a_changed_source_is_prepared_anew(tmp_path, corpus, change):
    before = opened(corpus, cache=tmp_path / "cache")
    if change == "content":
        write(corpus, {"d/one.txt": "another text"})
    elif change == "name":
        (corpus / "d/one.txt").rename(corpus / "d/three.txt")
    elif change == "more":
        write(corpus, {"e.txt": "more"})
    else:
        (corpus / "d/two.md").unlink()
    after = opened(corpus, cache=tmp_path / "cache")
    assert after.identity["data"] != before.identity["data"]
    assert after.store.folder != before.store.folder


def test_other_settings_make_other_stores(tmp_path, corpus):
    folders = {
        opened(corpus, cache=tmp_path / "cache").store.folder,
        opened(corpus, cache=tmp_path / "cache", held_out_fraction=0.2).store.folder,
        opened(
            corpus,
            cache=tmp_path / "cache",
            tokenizer=build_tokenizer(word_level(tmp_path, {"a": 0}, config={"eos_token": "<end>"})),
        ).store.folder,
    }
    assert len(folders) == 3


def test_an_empty_source_is_an_error_and_leaves_no_store(tmp_path):
    folder = write(tmp_path / "empty", {"a.txt": "", "b.jsonl": b"\n\n"})
    with pytest.raises(ConfigError, match="no text in"):
        opened(folder, cache=tmp_path / "cache")
    assert not [name for name in files_below(tmp_path / "cache") if "partial" in name or "stores/" in name]


def test_bad_rows_stay_an_error_after_someone_allowed_them(tmp_path):
    path = write(tmp_path, {"a.jsonl": jsonl(texts(50)) + b"{\n{}\n"}) / "a.jsonl"
    with pytest.raises(ConfigError, match="1 unreadable"):
        opened(path, cache=tmp_path / "cache")
    assert opened(path, cache=tmp_path / "cache", max_bad_rows=2).store.meta.bad_rows == 2
    with pytest.raises(ConfigError, match=r"2 unreadable(.|\n)*a\.jsonl:52: no key"):
        opened(path, cache=tmp_path / "cache", max_bad_rows=1)


@pytest.mark.parametrize("damage", ["train.tokens", "validation.offsets", "meta.json", "offset", "meta cut"])
def test_damage_is_named_and_can_be_put_right(tmp_path, corpus, damage):
    folder = opened(corpus, cache=tmp_path / "cache").store.folder
    if damage == "meta cut":
        (folder / "meta.json").write_text((folder / "meta.json").read_text()[:40])
    elif damage == "offset":
        content = (folder / "train.offsets").read_bytes()
        (folder / "train.offsets").write_bytes(content[:-8] + bytes(8))
    elif damage == "train.tokens":
        os.truncate(folder / damage, 100)
    else:
        (folder / damage).unlink()
    with pytest.raises(ConfigError, match=rf"{folder} is damaged .*delete that folder"):
        opened(corpus, cache=tmp_path / "cache")
    shutil.rmtree(folder)
    opened(corpus, cache=tmp_path / "cache")


def test_a_damaged_listing_only_costs_time(tmp_path, corpus):
    first = opened(corpus, cache=tmp_path / "cache")
    (listing,) = (tmp_path / "cache").glob("sources/*/files.json")
    listing.write_text(listing.read_text()[:50])
    assert opened(corpus, cache=tmp_path / "cache").store.folder == first.store.folder
    assert json.loads(listing.read_text())


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache_folder .*/file: "):
        opened(corpus, cache=tmp_path / "file")


def test_a_killed_preparation_starts_over_and_leaves_nothing_behind(tmp_path):
    corpus = write(tmp_path, {"a.jsonl": jsonl(texts(30_000, words=200))}) / "a.jsonl"
    cache = tmp_path / "cache"
    process = start_preparing(corpus, cache=cache, log=tmp_path / "log")
    encoders = wait_for(lambda: list(cache.glob("sources/*/partial")) and children(process.pid))
    process.kill()
    assert finished(process) == -signal.SIGKILL
    assert list(cache.glob("sources/*/partial"))
    assert not (cache / "stores").exists()
    wait_for(lambda: not any(alive(pid) for pid in encoders))
    smaller = jsonl(texts(500))
    corpus.write_bytes(smaller)
    prepared = opened(corpus, cache=cache)
    assert sum(prepared.store.meta.documents.values()) == 500
    fresh = opened(corpus, cache=tmp_path / "fresh")
    assert files_below(cache) == files_below(tmp_path / "fresh")
    for name in ("train.tokens", "train.offsets", "validation.tokens", "validation.offsets", "meta.json"):
        assert (prepared.store.folder / name).read_bytes() == (fresh.store.folder / name).read_bytes()


def test_two_processes_share_one_preparation(tmp_path):
    corpus = write(tmp_path, {"a.jsonl": jsonl(texts(4000))}) / "a.jsonl"
    logs = [tmp_path / "log0", tmp_path / "log1"]
    processes = [start_preparing(corpus, cache=tmp_path / "cache", log=log) for log in logs]
    assert [finished(process) for process in processes] == [0, 0]
    assert sorted("prepared" in log.read_text() for log in logs) == [False, True]
    assert sum(opened(corpus, cache=tmp_path / "cache").store.meta.documents.values()) == 4000


def test_two_paths_to_the_same_content_may_be_prepared_at_once(tmp_path):
    corpora = [write(tmp_path / name, {"a.jsonl": jsonl(texts(4000))}) for name in ("one", "two")]
    processes = [start_preparing(corpus, cache=tmp_path / "cache", log=tmp_path / "log") for corpus in corpora]
    assert [finished(process) for process in processes] == [0, 0]
    assert len(list((tmp_path / "cache" / "stores").iterdir())) == 1
    assert not list((tmp_path / "cache").glob("sources/*/partial"))


def wait_for(condition, timeout: float = 30):
    """The condition's first true value."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.005)
    return value


def children(pid: int) -> list[int]:
    """Processes that this one has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs, and is not just waiting to be forgotten."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
