"""Documents that occur before are dropped: of text and token ids, with every packing, and stores are still shared."""

import itertools
import logging
import pickle
import random
import shutil

import numpy as np
import pytest

from tests.data.corpora import TOKENIZER, files_below, jsonl, open_corpus, texts, write
from tests.data.loaders import SEQ_LEN, next_batches, train_loader
from tests.data.test_best_fit import targets_of, trained_targets
from tests.data.test_formats import documents_of, write_megatron
from torchtitan_clone.commands import prepare_data
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, DataSource, Training
from torchtitan_clone.config.stages import resolved_timeline
from torchtitan_clone.data import open_dataset
from torchtitan_clone.data.mixture import Mixture
from torchtitan_clone.tools.duplicates import KeptTokens, find_first

SHARED = texts(40, seed=7)
"""Texts of two sources at least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns text with copies within and between files, and token ids of a part of it."""
    order = random.Random(0)
    web = order.sample([*texts(60, seed=1), *SHARED, *SHARED[:9], *texts(50, seed=1)], 159)
    books = order.sample([*SHARED[20:], *texts(30, seed=2), *texts(10, seed=1), *SHARED[:5]], 65)
    found = write(
        tmp_path_factory.mktemp("copies"),
        {"web/a.jsonl": jsonl(web[:70]), "web/b.jsonl": jsonl(web[70:]), "books/a.jsonl": jsonl(books)},
    )
    ids = TOKENIZER.encode_batch([*texts(25, seed=2), *texts(30, seed=4), *texts(12, seed=4)])
    write_megatron(found / "ids", ids)  # documents without end-of-text tokens
    return found


def open_sources(folder, *names, cache="cache", **options):
    """Opens a mixture of the sources without duplicates."""
    sources = [DataSource(name=name, path=str(folder / name)) for name in names]
    choices = {"drop_duplicates": True, "held_out_fraction": 0.1, "prepare_processes": 1} | options
    data = Data(sources=sources, cache_folder=str(folder / cache), **choices)
    training = Training(seq_len=SEQ_LEN)
    mixture = Mixture(resolved_timeline(data, training=training, global_batch_size=8), seed=0)
    return open_dataset(training=training, data=data, tokenizer=TOKENIZER, mixture=mixture)


def all_documents(store):
    """Returns the documents of both splits."""
    return [tuple(each) for split in ("train", "validation") for each in documents_of(store, split)]


@pytest.mark.parametrize("seed", range(8))
def test_the_first_of_equal_hashes_is_found(seed):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(0, 200, 4)
    lists = [generator.integers(0, generator.integers(1, 12), (size, 2)).astype(np.uint64) for size in sizes]
    seen = set()
    expected = []
    for hashes in lists:
        expected.append([])
        for each in map(tuple, hashes.tolist()):
            expected[-1].append(each not in seen)
            seen.add(each)
    for at_once in (10**6, 150, 7):
        assert [each.tolist() for each in find_first(lists, at_once=at_once)] == expected


def test_kept_tokens_are_read_like_an_array():
    tokens = np.arange(100, dtype=np.uint16)
    kept = np.concatenate([tokens[3:10], tokens[20:21], tokens[50:100]])
    found = KeptTokens(tokens, runs=np.array([[0, 3], [7, 20], [8, 50], [58, 0]]))
    assert len(found) == len(kept)
    for start, stop in itertools.combinations_with_replacement(range(60), 2):
        assert np.array_equal(found[start:stop], kept[start:stop])
    assert found[2:30].dtype == np.uint16


def test_documents_of_earlier_sources_are_dropped(folder, caplog):
    caplog.set_level(logging.INFO, logger="torchtitan_clone")
    names = ("web", "books", "ids")
    whole = open_sources(folder, *names, drop_duplicates=False)
    found = open_sources(folder, *names)
    seen = set()
    for name in names:
        kept = []
        for split in ("train", "validation"):
            documents = [tuple(each) for each in documents_of(whole.sources[name].store, split)]
            first = [each for place, each in enumerate(documents) if each not in {*seen, *kept, *documents[:place]}]
            kept += first
            store = found.sources[name].store
            assert [tuple(each) for each in documents_of(store, split)] == first
            assert store.meta.documents[split] == len(first)
            assert store.meta.tokens[split] == sum(map(len, first)) == len(store.tokens(split))
        dropped = len(all_documents(whole.sources[name].store)) - len(kept)
        assert dropped > 10
        total = len(all_documents(whole.sources[name].store))
        assert f"dropped {dropped} of {total} documents of {folder / name}" in caplog.text
        seen |= set(kept)
    # The stores are those of the run that keeps all, and nothing is compared again.
    assert found.sources["web"].store.folder.parent == whole.sources["web"].store.folder
    before = files_below(folder / "cache")
    caplog.clear()
    again = pickle.loads(pickle.dumps(open_sources(folder, *names)))
    assert (files_below(folder / "cache"), "dropped" in caplog.text) == (before, False)
    assert all_documents(again.sources["ids"].store) == all_documents(found.sources["ids"].store)


def test_what_a_source_is_compared_with_identifies_it(folder):
    def fingerprints(*names, **options):
        opened = open_sources(folder, *names, **options)
        return {name: source.identity.data for name, source in opened.sources.items()}

    both, three = fingerprints("web", "books"), fingerprints("web", "books", "ids")
    assert both == {name: three[name] for name in both}
    reverse = fingerprints("books", "web")
    assert not {*reverse.values()} & {*both.values()}
    assert not {*fingerprints("web", "books", drop_duplicates=False).values()} & {*both.values(), *reverse.values()}
    unique = open_sources(folder, "web").sources["web"]
    state = train_loader(open_sources(folder, "web", drop_duplicates=False).sources["web"]).state_dict()
    with pytest.raises(ConfigError, match="the fingerprint of the data"):
        train_loader(unique).load_state_dict(state, allow_change=False)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_every_kept_target_is_trained_once(folder, packing):
    opened = open_sources(folder, "web", "books", packing=packing)
    for source in opened.sources.values():
        documents = documents_of(source.store, "train")
        num_rows = source.num_rows("train", seq_len=SEQ_LEN)
        trained = trained_targets(next_batches(train_loader(source), -(-num_rows // 8)), count=num_rows)
        if packing == "best_fit":
            assert trained == targets_of(documents)
        else:  # up to the last row, which would not be full
            whole = list(itertools.chain(*documents))[: num_rows * SEQ_LEN + 1]
            assert trained == sorted(pair for pair in itertools.pairwise(whole) if pair[0] != TOKENIZER.eos_id)


def test_what_a_killed_process_leaves_is_made_anew(folder):
    expected = open_sources(folder, "web", "books").sources["books"].store
    shutil.copytree(folder / "cache", folder / "killed")
    for store in (folder / "killed" / "stores").iterdir():
        for made in ("hashes", *(path.name for path in store.glob("unique-*"))):
            shutil.rmtree(store / made)
            write(store, {f"{made}.partial/train.hashes": b"incomplete", f"{made}.partial/x.partial": b""})
    found = open_sources(folder, "web", "books", cache="killed").sources["books"].store
    assert not list(found.folder.parent.glob(f"{found.folder.name}.partial"))
    for path in expected.folder.glob("*.*"):
        assert (found.folder / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train.runs", lambda runs: runs[:-2]),
        ("train.runs", lambda runs: np.concatenate([runs[:3], runs[3:4] + 10**6, runs[4:]])),
        ("train.runs", lambda runs: np.concatenate([runs[:2], -runs[2:4], runs[4:]])),
        ("train.runs", lambda runs: runs[:0]),
        ("train.runs", lambda runs: runs[:-1]),
        ("train.runs", lambda runs: runs.view(np.uint8)[:-1]),
        ("train.offsets", lambda offsets: offsets.view(np.uint8)[:-1]),
        ("train.offsets", lambda offsets: offsets[:0]),
        ("train.offsets", lambda offsets: offsets[::-1]),
    ],
)
def test_damaged_runs_are_one_error(folder, name, change):
    store = open_sources(folder, "web").sources["web"].store
    path = store.folder / name
    before = path.read_bytes()
    path.write_bytes(change(np.frombuffer(before, dtype=np.int64)).tobytes())
    with pytest.raises(ConfigError, match=r"is corrupt .*delete that folder to prepare it again"):
        open_sources(folder, "web")
    path.write_bytes(before)


def test_a_source_without_documents_of_its_own_is_one_error(folder):
    shutil.copytree(folder / "web", folder / "copy")
    with pytest.raises(ConfigError, match=r'name "copy": data\.drop_duplicates leaves none of its 1\d\d training'):
        open_sources(folder, "web", "copy")


def test_copies_are_not_blamed_for_a_source_without_training_documents(tmp_path):
    """Opening its loader is an error with and without drop_duplicates."""
    ids = write(tmp_path / "ids", {"train.bin": b"", "val.bin": np.arange(2, 9, dtype=np.uint16).tobytes()})
    dataset = open_corpus(ids, cache=tmp_path / "cache", drop_duplicates=True)
    assert dataset.store.meta.documents == {"train": 0, "validation": 1}
    with pytest.raises(ConfigError, match="add text"):
        train_loader(dataset)


def test_streamed_documents_are_not_compared():
    for training, sources in (
        (Training(dataset="org/name"), []),
        (Training(), [DataSource(name="web", path="nowhere"), DataSource(name="hub", dataset="org/name")]),
    ):
        with pytest.raises(ConfigError, match=r"data\.drop_duplicates = true: .* streamed, .* set it to false"):
            open_dataset(training=training, data=Data(drop_duplicates=True, sources=sources), tokenizer=TOKENIZER)


def test_without_the_tools_the_option_is_an_error_before_text_is_read(folder, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_CLONE_TOOLS", "0")
    message = (
        r"data\.drop_duplicates = true: \$TORCHTITAN_CLONE_TOOLS = 0 closes .*; unset it, or set the option to false"
    )
    with pytest.raises(ConfigError, match=message):
        open_sources(folder, "web", cache="closed")
    assert not (folder / "closed").exists()


def test_the_script_prepares_all_sources_without_duplicates(folder, capsys):
    script = prepare_data
    sources = ", ".join(f'{{name = "{name}", path = "{folder / name}"}}' for name in ("web", "ids"))
    words = [f"--data.sources=[{sources}]", "--data.drop_duplicates=true", "--part_mib=0.001"]
    words += [f"--data.cache_folder={folder / 'tasks'}", "--data.held_out_fraction=0.1", "--data.prepare_processes=1"]
    with pytest.raises(SystemExit):
        script.main([*words, "--task=0", "--tasks=-2"])
    assert "--tasks=-2: must be at least 1" in capsys.readouterr().err
    for task in (1, 0, 1):  # a task that is started again finds the stores complete
        assert script.main([*words, f"--task={task}", "--tasks=2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    expected = open_sources(folder, "web", "ids")
    assert shown[0] == "task 1 of 2 is done; others are not"
    assert shown[1:3] == shown[3:]
    for name, line in zip(("web", "ids"), shown[1:3], strict=True):
        store = expected.sources[name].store
        assert line.startswith(f"{folder / name}: {sum(store.meta.tokens.values()):,} tokens in ")
        assert line.endswith(f"/{store.folder.name}")
