"""What a trainer relies on: every rank's rows, the same whoever reads them, and the same after a resume."""

import json
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.corpora import TOKENIZER, opened, texts, write, write_corpus
from tests.data.test_token_store import alive, children, wait_for
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Data, Training
from torchtitan_clone.data import IGNORE_INDEX, Batch, Loader, build_loader, open_dataset

SEQ_LEN = 16
GLOBAL_BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of every kind of file, beside the cache it is prepared in."""
    folder = tmp_path_factory.mktemp("loader")
    write_corpus(folder / "corpus", count=60)
    return folder


@pytest.fixture(scope="module")
def dataset(folder):
    """The corpus, opened."""
    return opened(folder / "corpus", cache=folder / "cache")


def train_loader(dataset, *, rank: int = 0, num_ranks: int = 1, **changes) -> Loader:
    """A loader with the options of these tests."""
    options = {
        "seq_len": SEQ_LEN,
        "document_masking": True,
        "seed": 0,
        "global_batch_size": GLOBAL_BATCH,
        "num_workers": 0,
    }
    return build_loader(dataset=dataset, split="train", rank=rank, num_ranks=num_ranks, **{**options, **changes})


def validation_loader(dataset, *, rank: int = 0, num_ranks: int = 1, seq_len: int = SEQ_LEN, document_masking=True):
    """A loader of the held-out split."""
    return build_loader(
        dataset=dataset,
        split="validation",
        seq_len=seq_len,
        document_masking=document_masking,
        seed=0,
        global_batch_size=GLOBAL_BATCH,
        rank=rank,
        num_ranks=num_ranks,
    )


def rows_of(batches: list[Batch]) -> np.ndarray:
    """Tokens of all batches, and the last target, as the rows they were packed from."""
    tokens = torch.cat([batch.tokens_BT for batch in batches])
    return tokens.numpy()


def take(loader, count: int) -> list[Batch]:
    """The next batches."""
    return [next(loader) for _ in range(count)]


def assert_equal(left: list[Batch], right: list[Batch]) -> None:
    """All tensors of all batches are the same."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for name in ("tokens_BT", "targets_BT", "positions_BT", "documents_BT"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert one.num_targets == other.num_targets


def joined(of_ranks: list[list[Batch]]) -> list[Batch]:
    """The global batches, from the batches of all ranks."""
    return [
        Batch(
            **{
                name: torch.cat([getattr(batch, name) for batch in batches])
                for name in ("tokens_BT", "targets_BT", "positions_BT", "documents_BT")
            },
            num_targets=sum(batch.num_targets for batch in batches),
        )
        for batches in zip(*of_ranks, strict=True)
    ]


def test_an_epoch_has_every_row_once_over_all_ranks(dataset):
    tokens = dataset.store.tokens("train")
    num_rows = (len(tokens) - 1) // SEQ_LEN
    expected = sorted(tokens[start * SEQ_LEN :][:SEQ_LEN].tolist() for start in range(num_rows))
    steps = 2 * num_rows // GLOBAL_BATCH + 1
    loaders = [train_loader(dataset, rank=rank, num_ranks=4) for rank in range(4)]
    rows = rows_of([next(loader) for _ in range(steps) for loader in loaders])
    first, second = rows[:num_rows].tolist(), rows[num_rows : 2 * num_rows].tolist()
    assert sorted(first) == sorted(second) == expected
    assert first != second
    assert first != expected


def test_targets_are_the_next_tokens_of_the_store(dataset):
    stored = dataset.store.tokens("train").astype(np.int64)
    windows = {stored[start : start + SEQ_LEN + 1].tobytes() for start in range(0, len(stored) - SEQ_LEN, SEQ_LEN)}
    for batch in take(train_loader(dataset, document_masking=False), 10):
        rows = torch.cat([batch.tokens_BT, batch.targets_BT[:, -1:]], dim=1)
        assert torch.equal(batch.tokens_BT[:, 1:], batch.targets_BT[:, :-1])
        assert batch.documents_BT is None
        assert {row.numpy().tobytes() for row in rows} <= windows


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_together_read_what_one_reads(dataset, num_ranks):
    alone = take(train_loader(dataset), 12)
    of_ranks = [take(train_loader(dataset, rank=rank, num_ranks=num_ranks), 12) for rank in range(num_ranks)]
    assert_equal(joined(of_ranks), alone)


def test_a_batch_larger_than_the_source_repeats_it(tmp_path):
    dataset = opened(write(tmp_path / "text", {"a.txt": "x = 1\n" * 20}), cache=tmp_path / "cache")
    rows = rows_of(take(train_loader(dataset), 2)).tolist()
    distinct = len({tuple(row) for row in rows})
    assert distinct <= dataset.store.meta.tokens["train"] // SEQ_LEN < GLOBAL_BATCH


def test_another_seed_is_another_order(dataset):
    assert not np.array_equal(rows_of(take(train_loader(dataset), 2)), rows_of(take(train_loader(dataset, seed=1), 2)))


def steps_per_epoch(dataset) -> int:
    """Global batches that an epoch fills, rounded up."""
    return -(-((dataset.store.meta.tokens["train"] - 1) // SEQ_LEN) // GLOBAL_BATCH)


@pytest.mark.parametrize("epochs", [0.3, 1, 2.6])
def test_a_resume_goes_on_exactly(dataset, epochs):
    loader = train_loader(dataset)
    take(loader, int(epochs * steps_per_epoch(dataset)))
    state = json.loads(json.dumps(loader.state_dict()))
    expected = take(loader, 6)
    resumed = train_loader(dataset)
    resumed.load_state_dict(state, allow_change=False)
    assert_equal(take(resumed, 6), expected)
    assert resumed.state_dict() == loader.state_dict()


def test_a_resume_on_other_ranks_goes_on_exactly(dataset):
    of_ranks = [train_loader(dataset, rank=rank, num_ranks=2) for rank in range(2)]
    for loader in of_ranks:
        take(loader, 5)
    state = of_ranks[0].state_dict()
    assert state == of_ranks[1].state_dict()
    assert state["samples"] == 5 * GLOBAL_BATCH
    expected = joined([take(loader, 4) for loader in of_ranks])
    for num_ranks in (1, 4):
        found = []
        for rank in range(num_ranks):
            resumed = train_loader(dataset, rank=rank, num_ranks=num_ranks)
            resumed.load_state_dict(state, allow_change=False)
            found.append(take(resumed, 4))
        assert_equal(joined(found), expected)


def test_another_batch_size_goes_on_behind_the_samples_so_far(dataset):
    loader = train_loader(dataset)
    take(loader, 3)
    resumed = train_loader(dataset, global_batch_size=4)
    resumed.load_state_dict(loader.state_dict(), allow_change=False)
    assert np.array_equal(rows_of(take(resumed, 4)), rows_of(take(loader, 2)))


def test_a_loader_that_has_run_can_go_back(dataset):
    loader = train_loader(dataset)
    state = loader.state_dict()
    first = take(loader, 3)
    loader.load_state_dict(state, allow_change=False)
    assert_equal(take(loader, 3), first)


CHANGES = [
    ({"seq_len": 32}, "training.seq_len was 16 and is 32"),
    ({"seed": 7}, "debug.seed was 0 and is 7"),
    ({"document_masking": False}, "training.document_masking was True and is False"),
]


@pytest.mark.parametrize(("change", "report"), CHANGES)
def test_a_changed_option_is_named(dataset, caplog, change, report):
    loader = train_loader(dataset)
    take(loader, 2)
    other = train_loader(dataset, **change)
    with pytest.raises(ConfigError) as error:
        other.load_state_dict(loader.state_dict(), allow_change=False)
    assert report in str(error.value)
    assert "checkpoint.allow_data_change" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        other.load_state_dict(loader.state_dict(), allow_change=True)
    assert report in caplog.text
    assert other.state_dict()["samples"] == 2 * GLOBAL_BATCH
    next(other)


def test_changed_data_are_named(folder, tmp_path, dataset):
    state = train_loader(dataset).state_dict()
    write_corpus(tmp_path / "corpus", seed=1)
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        train_loader(opened(tmp_path / "corpus", cache=folder / "cache")).load_state_dict(state, allow_change=False)
    split_anew = opened(folder / "corpus", cache=folder / "cache", held_out_fraction=0.3)
    with pytest.raises(ConfigError, match=r"data\.held_out_fraction was 0\.1 and is 0\.3"):
        train_loader(split_anew).load_state_dict(state, allow_change=False)


def test_a_source_shorter_than_a_row_is_an_error(tmp_path):
    dataset = opened(write(tmp_path / "text", {"a.txt": "short"}), cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"train split .* one row takes training\.seq_len \+ 1 = 17"):
        train_loader(dataset)


def test_an_empty_held_out_split_says_what_to_do(folder):
    dataset = opened(folder / "corpus", cache=folder / "cache", held_out_fraction=0.0)
    with pytest.raises(ConfigError, match=r"validation split .* raise data\.held_out_fraction"):
        validation_loader(dataset)


def test_an_id_beyond_the_vocabulary_is_damage(tmp_path):
    dataset = opened(write_corpus(tmp_path / "corpus", count=20), cache=tmp_path / "cache")
    path = dataset.store.folder / "train.tokens"
    content = np.fromfile(path, dtype=np.uint16)
    content[5] = 2048
    content.tofile(path)
    with pytest.raises(ConfigError, match=r"damaged .*token id 2048, and the tokenizer has 2048 ids"):
        take(train_loader(dataset), 100)


@pytest.mark.parametrize("document_masking", [True, False])
def test_validation_reads_the_held_out_rows_once_in_step(dataset, document_masking):
    stored = dataset.store.tokens("validation")
    num_rows = (len(stored) - 1) // SEQ_LEN
    assert num_rows % GLOBAL_BATCH, "the last batch should need filling up"
    loaders = [
        validation_loader(dataset, rank=rank, num_ranks=4, document_masking=document_masking) for rank in range(4)
    ]
    for _ in range(2):
        of_ranks = [list(loader) for loader in loaders]
        assert {len(batches) for batches in of_ranks} == {len(loaders[0])} == {-(-num_rows // GLOBAL_BATCH)}
        rows = torch.cat([batch.tokens_BT for batches in zip(*of_ranks, strict=True) for batch in batches])
        targets = torch.cat([batch.targets_BT for batches in zip(*of_ranks, strict=True) for batch in batches])
        assert rows[:num_rows].flatten().tolist() == stored[: num_rows * SEQ_LEN].tolist()
        assert (targets[num_rows:] == IGNORE_INDEX).all()
        counted = sum(batch.num_targets for batches in of_ranks for batch in batches)
        ends = np.count_nonzero(stored[: num_rows * SEQ_LEN] == TOKENIZER.eos_id) if document_masking else 0
        assert counted == num_rows * SEQ_LEN - ends


def test_held_out_documents_are_never_trained_on(dataset):
    """Every text of the corpus starts with a name of its own."""
    rows = texts(60)
    trained = TOKENIZER.decode(dataset.store.tokens("train").tolist())
    validated = TOKENIZER.decode(dataset.store.tokens("validation").tolist())
    assert all((row in trained) != (row in validated) for row in rows)


def test_more_workers_than_rows_are_refused(dataset):
    with pytest.raises(ConfigError, match=r"data\.num_workers = 3 is more than the 2 rows"):
        train_loader(dataset, num_ranks=4, num_workers=3)


def test_workers_read_what_this_process_reads_and_may_come_and_go(dataset):
    expected = take(train_loader(dataset), 9)
    loader = train_loader(dataset, num_workers=3)
    assert_equal(take(loader, 5), expected[:5])
    state = loader.state_dict()
    assert state["samples"] == 5 * GLOBAL_BATCH
    without = train_loader(dataset)
    without.load_state_dict(state, allow_change=False)
    assert_equal(take(without, 2), expected[5:7])
    with_one = train_loader(dataset, num_workers=1)
    with_one.load_state_dict(without.state_dict(), allow_change=False)
    assert_equal(take(with_one, 2), expected[7:])


def read_with_a_worker(dataset, pipe) -> None:
    """Says which batches it reads, each time it is asked, until it is killed."""
    loader = train_loader(dataset, num_workers=1)
    while True:
        pipe.send(next(loader).tokens_BT.tolist())
        pipe.recv()


def workers_of(trainer: int) -> list[int]:
    return [pid for pid in children(trainer) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_worker_outlives_signals_but_not_its_trainer(dataset):
    processes = multiprocessing.get_context("forkserver")
    mine, theirs = processes.Pipe()
    trainer = processes.Process(target=read_with_a_worker, args=(dataset, theirs))
    trainer.start()
    theirs.close()
    expected = [batch.tokens_BT.tolist() for batch in take(train_loader(dataset), 8)]
    wait_for(lambda: workers_of(trainer.pid), timeout=20)
    (worker,) = workers_of(trainer.pid)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, number)  # it has only just started
        assert mine.recv() == expected[0]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, number)
        for rows in expected[1:]:  # more than what was read ahead
            mine.send(None)
            assert mine.recv() == rows
    finally:
        trainer.kill()
        trainer.join()
    wait_for(lambda: not alive(worker), timeout=20)


def test_options_lead_to_the_dataset(stdlib_cache):
    data = Data(cache_folder=str(stdlib_cache))
    dataset = open_dataset(training=Training(), data=data, tokenizer=TOKENIZER)
    batch = next(train_loader(dataset, seq_len=2048))
    assert "def " in TOKENIZER.decode(batch.tokens_BT.flatten().tolist())
    assert len(validation_loader(dataset, seq_len=2048)) >= 1


def test_a_batch_is_divided_among_parts_that_come_and_go_and_fed_again_until_it_is_done_with(dataset):
    whole = train_loader(dataset)
    loaders = {
        (part, rank): train_loader(dataset, rank=rank, num_ranks=2, local_batch_size=2)
        for part in range(3)
        for rank in range(2)
    }
    # Part 2 is away for a batch, and what it had taken before is not lost.
    for step, parts in enumerate((3, 2, 3)):
        expected = next(whole)
        for _ in range(2):
            found = {}
            for (part, _), loader in loaders.items():
                if part < parts:
                    batch = loader.take(part=part, parts=parts)
                    assert len(batch.tokens_BT) == 2
                    counted = len(loader.taken)
                    assert (batch.targets_BT[counted:] == IGNORE_INDEX).all()
                    found |= dict(zip(loader.taken, zip(batch.tokens_BT, batch.targets_BT, strict=True), strict=False))
            assert sorted(found) == list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
            for row, (tokens, targets) in found.items():
                torch.testing.assert_close(tokens, expected.tokens_BT[row % GLOBAL_BATCH])
                torch.testing.assert_close(targets, expected.targets_BT[row % GLOBAL_BATCH])
        for (part, _), loader in loaders.items():
            if part < parts:
                loader.advance()
            else:
                loader.load_state_dict(loaders[0, 0].state_dict(), allow_change=False)
