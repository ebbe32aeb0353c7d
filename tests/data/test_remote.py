"""Data in an object store is what it is on the disk: its rows, its identity, and where a run resumes."""

import json
import os
import pickle
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import TOKENIZER, open_corpus, write, write_corpus
from tests.data.loaders import (
    GLOBAL_BATCH,
    SEQ_LEN,
    assert_equal,
    concatenate,
    next_batches,
    train_loader,
    validation_loader,
)
from tests.data.processes import wait_for
from tests.support.harness import run_ranks
from tests.support.object_server import assert_refused, served_process
from tests.support.runs import exit_codes, losses, options, train
from torchtitan_clone.commands.prepare_data import main as prepare_data
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, DataSource, Training
from torchtitan_clone.config.stages import resolved_timeline
from torchtitan_clone.data import open_dataset, remote
from torchtitan_clone.data.dataset import TokenDataset
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.data.remote import MANIFEST_FILE, fetch_files, put_token_store
from torchtitan_clone.storage.objects import open_store

SMALL_BLOCK = 1 << 8
prepare_corpus = partial(open_corpus, prepare_processes=1)


@pytest.fixture(scope="module")
def server():
    with served_process() as started:
        yield started


@pytest.fixture(scope="module")
def local(local_dataset):
    """Returns the dataset of a corpus on the disk."""
    return local_dataset


@pytest.fixture(scope="module")
def stored(server, local):
    """Returns the URL of its token store, in small blocks."""
    url = f"{server.make_bucket()}/tokens"
    put_token_store(local.store, url, block_bytes=SMALL_BLOCK)
    return url


def put_folder(folder: Path, url: str) -> str:
    """Puts the files of a folder; returns the URL."""
    store = open_store(url, timeout_seconds=20)
    for path in filter(Path.is_file, folder.rglob("*")):
        store.put(path.relative_to(folder).as_posix(), path.read_bytes())
    return url


def blocks(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "remote" / "blocks").glob("*/*") if path.is_file())


def test_a_token_store_has_the_rows_and_the_identity_of_the_local_one(local, stored, tmp_path):
    found = open_corpus(stored, cache=tmp_path)
    assert found.identity == local.identity
    assert found.store.folder.name == local.store.folder.name
    assert_equal(next_batches(train_loader(found), 200), next_batches(train_loader(local), 200))
    assert_equal(list(validation_loader(found)), list(validation_loader(local)))
    assert len(blocks(tmp_path)) > 10
    again = pickle.loads(pickle.dumps(open_corpus(stored, cache=tmp_path)))
    assert_equal(next_batches(train_loader(again), 5), next_batches(train_loader(local), 5))


def test_rows_packed_by_best_fit_are_those_of_the_local_store(local, stored, tmp_path):
    packed = TokenDataset(store=replace(local.store, packing="best_fit"))
    found = open_corpus(stored, cache=tmp_path, packing="best_fit")
    assert found.identity == packed.identity
    assert_equal(next_batches(train_loader(found), 30), next_batches(train_loader(packed), 30))


def test_a_mixture_without_duplicates_is_that_of_the_local_stores(server, small_corpus, stored, tmp_path):
    write_corpus(tmp_path / "other", count=60, seed=1)
    other = put_folder(tmp_path / "other", f"{server.make_bucket()}/texts")

    def open_both(paths, cache):
        entries = [DataSource(name=name, path=str(path)) for name, path in zip("ab", paths, strict=True)]
        options = {"cache_folder": str(cache), "prepare_processes": 1, "drop_duplicates": True}
        data = Data(sources=entries, held_out_fraction=0.1, **options)
        training = Training(seq_len=SEQ_LEN)
        timeline = resolved_timeline(data, training=training, global_batch_size=GLOBAL_BATCH)
        mixture = Mixture(timeline, seed=0)
        return open_dataset(training=training, data=data, tokenizer=TOKENIZER, mixture=mixture)

    corpus = small_corpus / "corpus"
    shutil.copytree(small_corpus / "cache", tmp_path / "1")
    expected = open_both([corpus, tmp_path / "other"], tmp_path / "1")
    found = open_both([stored, other], tmp_path / "2")
    assert found.record(samples=80) == expected.record(samples=80)
    assert_equal(next_batches(train_loader(found), 20), next_batches(train_loader(expected), 20))
    assert_equal(list(validation_loader(found)), list(validation_loader(expected)))


def test_a_run_moves_to_the_store_and_back_on_other_ranks(local, stored, tmp_path):
    first = train_loader(local)
    next_batches(first, 7)
    state = json.loads(json.dumps(first.state_dict()))
    expected = next_batches(first, 6)
    found = open_corpus(stored, cache=tmp_path)
    resumed = [train_loader(found, rank=rank, num_ranks=2) for rank in range(2)]
    for loader in resumed:
        loader.load_state_dict(state, allow_change=False)
    assert_equal(concatenate([next_batches(loader, 3) for loader in resumed]), expected[:3])
    back = train_loader(local)
    back.load_state_dict(resumed[0].state_dict(), allow_change=False)
    assert_equal(next_batches(back, 3), expected[3:])


def read_rows(url: str, cache: Path) -> list:
    """Returns this rank's batches, which it reads through a cache that holds a block of each set."""
    rank = int(os.environ["RANK"])
    dataset = open_corpus(url, cache=cache, cache_gib=0.25)
    return [batch.tokens_BT.numpy() for batch in next_batches(train_loader(dataset, rank=rank, num_ranks=2), 60)]


def test_two_ranks_share_a_cache_under_its_limit(server, local, stored, tmp_path):
    most: list[int] = [0]
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            names = [path.parent.name for path in blocks(tmp_path)]
            most.append(max(map(names.count, names), default=0))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    of_ranks = run_ranks(read_rows, 2, stored, tmp_path, env=server.env)
    is_done.set()
    watcher.join()
    expected = [batch.tokens_BT.numpy() for batch in next_batches(train_loader(local), 60)]
    assert all(np.array_equal(np.concatenate(each), rows) for *each, rows in zip(*of_ranks, expected, strict=True))
    assert max(most) == 1


def test_a_damaged_block_is_fetched_again(local, stored, tmp_path, caplog):
    next_batches(train_loader(open_corpus(stored, cache=tmp_path)), 30)
    for number, path in enumerate(blocks(tmp_path)):
        content = bytearray(path.read_bytes())
        content[number % len(content)] ^= 1
        path.write_bytes(content[: len(content) >> (number % 3)])
    found = open_corpus(stored, cache=tmp_path)
    assert_equal(next_batches(train_loader(found), 30), next_batches(train_loader(local), 30))
    assert "is damaged, and is fetched again" in caplog.text


@pytest.mark.parametrize("mode", ["gone", "busy", "stall"])
def test_a_server_that_fails_for_two_seconds_costs_no_row(server, local, stored, tmp_path, mode):
    loader, expected = train_loader(open_corpus(stored, cache=tmp_path)), train_loader(local)
    server.proxy.mode = mode
    threading.Timer(2.0, lambda: setattr(server.proxy, "mode", "pass")).start()
    assert_equal(next_batches(loader, 30), next_batches(expected, 30))


def test_the_end_of_a_loader_ends_its_thread(stored, tmp_path):
    names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
    loader = train_loader(open_corpus(stored, cache=tmp_path))
    next_batches(loader, 2)
    assert "reads ahead" in names()
    loader.load_state_dict(loader.state_dict(), allow_change=False)
    wait_for(lambda: "reads ahead" not in names())


def test_a_token_store_that_was_replaced_is_an_error(server, local, tmp_path):
    url = f"{server.make_bucket()}/tokens"
    put_token_store(local.store, url, block_bytes=SMALL_BLOCK)
    loader = train_loader(open_corpus(url, cache=tmp_path))
    store = open_store(url, timeout_seconds=20)
    store.put("train.tokens", bytes(store.size("train.tokens") or 0))
    with pytest.raises(ConfigError, match=f"{url}/train.tokens: bytes .* are not what was put there"):
        next_batches(loader, 60)
    with pytest.raises(ConfigError, match="there is a token store; choose another prefix"):
        put_token_store(local.store, url)
    store.delete([MANIFEST_FILE])
    other = prepare_corpus(write_corpus(tmp_path / "other", count=60, seed=1), cache=tmp_path / "cache")
    put_token_store(other.store, url)
    resumed = train_loader(prepare_corpus(url, cache=tmp_path))
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        resumed.load_state_dict(train_loader(local).state_dict(), allow_change=False)


def test_ids_of_another_program_become_a_token_store(server, tmp_path):
    ids = np.random.default_rng(0).integers(1, TOKENIZER.vocab_size, 20_000).astype(np.uint16)
    ids[99::100] = TOKENIZER.eos_id
    write(tmp_path / "ids", {"train.bin": ids.tobytes()})
    local = prepare_corpus(tmp_path / "ids", cache=tmp_path / "1")
    url = f"{server.make_bucket()}/tokens"
    put_token_store(local.store, url, block_bytes=SMALL_BLOCK)
    found = prepare_corpus(url, cache=tmp_path / "2")
    assert found.identity == local.identity
    assert_equal(next_batches(train_loader(found), 20), next_batches(train_loader(local), 20))


# ---------------------------------------------------------------------- files


def test_files_in_a_store_are_prepared_as_those_on_the_disk(server, local, small_corpus, tmp_path):
    corpus = small_corpus / "corpus"
    url = put_folder(corpus, server.make_bucket())
    open_store(url, timeout_seconds=20).put(".hidden/file.txt", b"not read")
    found = prepare_corpus(url, cache=tmp_path)
    assert found.identity == local.identity
    assert_equal(next_batches(train_loader(found), 5), next_batches(train_loader(local), 5))
    received = server.proxy.received
    assert prepare_corpus(url, cache=tmp_path).identity == local.identity
    assert server.proxy.received - received < 10_000, "a listing, and no file"
    one = prepare_corpus(f"{url}/a.jsonl", cache=tmp_path)
    assert one.identity == prepare_corpus(corpus / "a.jsonl", cache=tmp_path / "local").identity


def test_an_object_that_changed_is_noticed_at_a_resume(server, tmp_path):
    url = put_folder(write_corpus(tmp_path / "corpus", count=60), server.make_bucket())
    state = train_loader(prepare_corpus(url, cache=tmp_path / "cache")).state_dict()
    store = open_store(url, timeout_seconds=20)
    content = store.get("d/one.txt", max_bytes=10_000)
    store.put("d/one.txt", content.replace(b"text", b"TEXT"))
    changed = train_loader(prepare_corpus(url, cache=tmp_path / "cache"))
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        changed.load_state_dict(state, allow_change=False)
    store.delete(["d/one.txt"])
    assert not (fetch_files(url, data=Data(cache_folder=str(tmp_path / "cache"))) / "d/one.txt").exists()
    store.put("d/one.txt", content)
    train_loader(prepare_corpus(url, cache=tmp_path / "cache")).load_state_dict(state, allow_change=False)


def test_files_take_no_more_room_than_their_limit(server, tmp_path):
    urls = [put_folder(write(tmp_path / name, {"a.txt": name * 3000}), server.make_bucket()) for name in "xyz"]
    fetch = partial(fetch_files, data=Data(cache_folder=str(tmp_path / "cache"), cache_gib=7000 / 2**30))
    first, second = map(fetch, urls[:2])
    with pytest.raises(
        ConfigError, match=r"data.cache_gib = .*: s3://.* takes 2.93 KiB beside 5.86 KiB that other runs"
    ):
        fetch(urls[2])
    while remote._in_use:  # as in another process
        remote._in_use.pop().close()
    third = fetch(urls[2])
    assert [each.exists() for each in (first, second, third)] == [False, True, True]
    with pytest.raises(ConfigError, match=r"takes 2.93 KiB beside 0 bytes that other runs use until it is tokenized"):
        fetch_files(urls[2], data=Data(cache_folder=str(tmp_path / "cache"), cache_gib=2000 / 2**30))


@pytest.mark.parametrize("name", ["a/b", "x" * 300])
def test_objects_that_cannot_be_files_are_refused(tmp_path, name):
    url = f"memory://{tmp_path.name.replace('_', '-')}/x"
    store = open_store(url, timeout_seconds=1)
    store.put("a/b/c.txt", b"text")
    store.put(name, b"text")
    with pytest.raises(ConfigError, match="cannot be the name of a file; rename it"):
        fetch_files(url, data=Data(cache_folder=str(tmp_path)))


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def refusals(server, stored, tmp_path_factory):
    """Returns what each wrong command line ends with, all of one process."""
    folder = tmp_path_factory.mktemp("refused")
    empty = f"{stored}/empty"
    urls = ["s4://bucket/x", "s3://user:password@bucket/x", "s3://there-is-no-such-bucket/x", empty]
    cases = [options(folder / "corpus", folder, training__dataset_path=url) for url in urls]
    cases.append(options(folder / "corpus", folder, training__dataset_path=stored, data__cache_gib=0.1))
    cases.append(options(folder / "corpus", folder, training__dataset_path=stored, data__held_out_fraction=0.2))
    cases.append(options(folder / "corpus", folder, training__dataset_path=stored, training__format="chat"))
    sources = f'[{{name = "web", path = "{empty}"}}]'
    cases.append(options(folder / "corpus", folder, training__dataset_path=None, data__sources=sources))
    answers = run_ranks(exit_codes, 1, cases, folder / "log", env=server.env)[0]
    server.proxy.mode = "refuse"
    refused = options(folder / "corpus", folder, training__dataset_path=stored)
    answers += run_ranks(exit_codes, 1, [refused], folder / "log", env=server.env)[0]
    server.proxy.mode = "pass"
    assert not list(folder.glob("run/*")), "nothing is written"
    return answers


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, r'training\.dataset_path = "s4://\.\.\.": unknown scheme; known: s3://'),
        (1, r'training\.dataset_path = "s3://\.\.\.": a URL must not hold credentials'),
        (2, r"training\.dataset_path = .*NoSuchBucket; .*; check the URL, the credentials"),
        (3, r"training\.dataset_path = .*: no objects there .*; check the URL, or put files there"),
        (4, r"data\.cache_gib = 0\.1: must be from 0\.25 to"),
        (5, r"was prepared with data\.held_out_fraction = 0\.1; set that"),
        (6, r'training\.format = "chat": s3://.* was prepared with "text"; set that'),
        (7, r'data\.sources, name "web": path = .*: no objects there'),
        (8, r"cannot read s3://\S+: .*403 Forbidden.*InvalidAccessKeyId; .*; check the URL, the credentials"),
    ],
)
def test_what_cannot_work_is_one_error_before_the_start(refusals, index, text):
    assert_refused(*refusals[index], text=text)


def test_a_run_continues_from_a_store_that_prepare_data_has_filled(server, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus", count=200)
    small = {"training__seq_len": 32, "model__args__n_layers": 1, "training__steps": 8, "checkpoint__interval": 4}
    argv = options(corpus, tmp_path, **small)
    assert train(argv, log_folder=tmp_path)[0] == 0
    before = losses(tmp_path)
    url = f"{server.make_bucket()}/tokens"
    assert prepare_data([*argv, f"--to={url}"]) == 0
    assert f"tokens in {url}" in capsys.readouterr().out
    shutil.rmtree(corpus)
    shutil.rmtree(tmp_path / "cache")
    again = [*argv, f"--training.dataset_path={url}", "--checkpoint.load_step=4"]
    code, output = train(again, world_size=2, log_folder=tmp_path, env=server.env)
    assert code == 0, output
    assert "step-4" in output
    assert losses(tmp_path) == pytest.approx(before, rel=1e-5)
