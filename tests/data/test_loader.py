"""Every rank's rows are the same whoever reads them, and the same after a resume."""

import json
import logging
import multiprocessing
import os
import resource
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.corpora import open_corpus, write_corpus
from tests.data.loaders import (
    GLOBAL_BATCH,
    SEQ_LEN,
    assert_equal,
    concatenate,
    next_batches,
    rows_of,
    train_loader,
)
from tests.data.processes import children, is_alive, wait_for
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import STOP_SIGNALS
from torchtitan_clone.data.dataset import TokenDataset
from torchtitan_clone.data.token_store import StoreKey, open_store
from torchtitan_clone.ops import IGNORE_INDEX


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_together_read_what_one_rank_reads(local_dataset, num_ranks):
    expected = next_batches(train_loader(local_dataset), 12)
    loaders = [train_loader(local_dataset, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert_equal(concatenate([next_batches(loader, 12) for loader in loaders]), expected)


def steps_per_epoch(dataset) -> int:
    """Returns the number of global batches of an epoch, rounded up."""
    return -(-((dataset.store.meta.tokens["train"] - 1) // SEQ_LEN) // GLOBAL_BATCH)


@pytest.mark.parametrize("epochs", [0.3, 1, 2.6])
def test_a_resumed_loader_continues_exactly(local_dataset, epochs):
    loader = train_loader(local_dataset)
    next_batches(loader, int(epochs * steps_per_epoch(local_dataset)))
    state = json.loads(json.dumps(loader.state_dict()))
    expected = next_batches(loader, 6)
    resumed = train_loader(local_dataset)
    resumed.load_state_dict(state, allow_change=False)
    assert_equal(next_batches(resumed, 6), expected)
    assert resumed.state_dict() == loader.state_dict()


def test_a_resume_on_other_ranks_continues_exactly(local_dataset):
    of_ranks = [train_loader(local_dataset, rank=rank, num_ranks=2) for rank in range(2)]
    for loader in of_ranks:
        next_batches(loader, 5)
    state = of_ranks[0].state_dict()
    assert state == of_ranks[1].state_dict()
    assert state["samples"] == 5 * GLOBAL_BATCH
    expected = concatenate([next_batches(loader, 4) for loader in of_ranks])
    for num_ranks in (1, 4):
        found = []
        for rank in range(num_ranks):
            resumed = train_loader(local_dataset, rank=rank, num_ranks=num_ranks)
            resumed.load_state_dict(state, allow_change=False)
            found.append(next_batches(resumed, 4))
        assert_equal(concatenate(found), expected)


def test_another_batch_size_resumes_after_the_same_samples(local_dataset):
    loader = train_loader(local_dataset)
    next_batches(loader, 3)
    resumed = train_loader(local_dataset, global_batch_size=4)
    resumed.load_state_dict(loader.state_dict(), allow_change=False)
    assert np.array_equal(rows_of(next_batches(resumed, 4)), rows_of(next_batches(loader, 2)))


def test_a_used_loader_can_load_an_earlier_state(local_dataset):
    loader = train_loader(local_dataset)
    state = loader.state_dict()
    first = next_batches(loader, 3)
    loader.load_state_dict(state, allow_change=False)
    assert_equal(next_batches(loader, 3), first)


CHANGES = [
    ({"seq_len": 32}, "training.seq_len was 16 and is 32"),
    ({"seed": 7}, "debug.seed was 0 and is 7"),
    ({"document_masking": False}, "training.document_masking was true and is false"),
]


@pytest.mark.parametrize(("change", "report"), CHANGES)
def test_a_changed_option_is_reported(local_dataset, caplog, change, report):
    loader = train_loader(local_dataset)
    next_batches(loader, 2)
    other = train_loader(local_dataset, **change)
    with pytest.raises(ConfigError) as error:
        other.load_state_dict(loader.state_dict(), allow_change=False)
    assert report in str(error.value)
    assert "set checkpoint.allow_data_change to true" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        other.load_state_dict(loader.state_dict(), allow_change=True)
    assert report in caplog.text
    assert other.state_dict()["samples"] == 2 * GLOBAL_BATCH
    next(other)


def test_changed_data_is_reported(small_corpus, tmp_path, local_dataset):
    state = train_loader(local_dataset).state_dict()
    write_corpus(tmp_path / "corpus", seed=1)
    other = train_loader(open_corpus(tmp_path / "corpus", cache=tmp_path / "cache"))
    with pytest.raises(ConfigError, match="the fingerprint of the data was"):
        other.load_state_dict(state, allow_change=False)
    other_split = open_corpus(small_corpus / "corpus", cache=small_corpus / "cache", held_out_fraction=0.3)
    with pytest.raises(ConfigError, match=r"data\.held_out_fraction was 0\.1 and is 0\.3"):
        train_loader(other_split).load_state_dict(state, allow_change=False)


def test_more_workers_than_rows_are_an_error(local_dataset):
    with pytest.raises(ConfigError, match=r"data\.num_workers = 3: more than the 2 .* set it to at most 2\."):
        train_loader(local_dataset, num_ranks=4, num_workers=3)


def test_workers_read_what_this_process_reads(local_dataset):
    undivided = train_loader(local_dataset)
    expected = next_batches(undivided, 2)
    before = undivided.state_dict()
    expected += next_batches(undivided, 9)
    loader = train_loader(local_dataset, num_workers=3)
    loader.load_state_dict(before, allow_change=False)
    random_state = torch.get_rng_state()
    assert_equal(next_batches(loader, 5), expected[2:7])
    assert torch.equal(torch.get_rng_state(), random_state)  # checkpoints hold it
    state = loader.state_dict()
    assert state["samples"] == 7 * GLOBAL_BATCH
    without = train_loader(local_dataset)
    without.load_state_dict(state, allow_change=False)
    assert_equal(next_batches(without, 4), expected[7:])


def test_workers_without_semaphores_are_an_error(local_dataset):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as if /dev/shm were full
    try:
        with pytest.raises(ConfigError, match=r"data\.num_workers = 2: .* need a writable /dev/shm.*; .*set it to 0\."):
            next(train_loader(local_dataset, num_workers=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_error_of_a_worker_is_that_of_the_process(tmp_path, local_dataset):
    """torch would raise it with the traceback of the worker as its message."""
    folder = shutil.copytree(local_dataset.store.folder, tmp_path / "store")
    key = StoreKey(**{field.name: getattr(local_dataset.store.meta, field.name) for field in fields(StoreKey)})
    dataset = TokenDataset(store=open_store(folder, key=key))
    np.memmap(folder / "train.tokens", dtype=np.uint16, mode="r+")[:] = 65535
    messages = []
    for num_workers in (0, 2):
        with pytest.raises(ConfigError) as caught:
            next(train_loader(dataset, num_workers=num_workers))
        messages.append(caught.value.messages)
    assert "it holds token id 65535, and the tokenizer has" in messages[0][0]
    assert messages[1] == messages[0]


def read_with_a_worker(dataset, pipe) -> None:
    """Sends the tokens of a batch for each message, until it is killed."""
    loader = train_loader(dataset, num_workers=1)
    while True:
        pipe.send(next(loader).tokens_BT.tolist())
        pipe.recv()


def workers_of(trainer: int) -> list[int]:
    """Returns the worker processes of a trainer."""
    return [pid for pid in children(trainer) if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_worker_survives_stop_signals_but_not_its_trainer(local_dataset):
    processes = multiprocessing.get_context("forkserver")
    mine, theirs = processes.Pipe()
    trainer = processes.Process(target=read_with_a_worker, args=(local_dataset, theirs))
    trainer.start()
    theirs.close()
    expected = [batch.tokens_BT.tolist() for batch in next_batches(train_loader(local_dataset), 8)]
    (worker,) = wait_for(lambda: workers_of(trainer.pid))
    try:
        for number in STOP_SIGNALS:
            os.kill(worker, number)  # it is still starting
        assert mine.recv() == expected[0]
        for number in STOP_SIGNALS:
            os.kill(worker, number)
        for rows in expected[1:]:  # more batches than it has read ahead
            mine.send(None)
            assert mine.recv() == rows
    finally:
        trainer.kill()
        trainer.join()
    wait_for(lambda: not is_alive(worker))


def test_reading_ahead_changes_neither_batches_nor_the_state(local_dataset):
    expected = train_loader(local_dataset)
    loader = train_loader(local_dataset)
    for step in range(6):
        batch = loader.next_batch(num_replicas=1 + step // 3)  # what was read ahead is not of the smaller group
        for _ in range(2):
            loader.read_ahead()
        assert loader.state_dict() == expected.state_dict()
        assert_equal([batch], [expected.next_batch(num_replicas=1 + step // 3)])
        loader.commit()
        expected.commit()
    loader.read_ahead()
    loader.load_state_dict(train_loader(local_dataset).state_dict(), allow_change=False)
    assert_equal(next_batches(loader, 1), next_batches(train_loader(local_dataset), 1))


def test_replica_groups_share_a_batch_until_it_is_committed(local_dataset):
    undivided = train_loader(local_dataset)
    loaders = {
        (replica_index, rank): train_loader(local_dataset, rank=rank, num_ranks=2, local_batch_size=2)
        for replica_index in range(3)
        for rank in range(2)
    }
    # Group 2 is absent for a batch; the samples that it had read before are not lost.
    for step, num_replicas in enumerate((3, 2, 3)):
        expected = next(undivided)
        for _ in range(2):
            found = {}
            for (replica_index, _), loader in loaders.items():
                if replica_index < num_replicas:
                    batch = loader.next_batch(replica_index=replica_index, num_replicas=num_replicas)
                    samples = loader.sample_range
                    assert len(batch.tokens_BT) == 2
                    assert (batch.targets_BT[len(samples) :] == IGNORE_INDEX).all()
                    found |= dict(zip(samples, zip(batch.tokens_BT, batch.targets_BT, strict=True), strict=False))
            assert sorted(found) == list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
            for sample, (tokens, targets) in found.items():
                torch.testing.assert_close(tokens, expected.tokens_BT[sample % GLOBAL_BATCH])
                torch.testing.assert_close(targets, expected.targets_BT[sample % GLOBAL_BATCH])
        for (replica_index, _), loader in loaders.items():
            if replica_index < num_replicas:
                loader.commit()
            else:
                loader.load_state_dict(loaders[0, 0].state_dict(), allow_change=False)
