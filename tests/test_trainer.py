"""Tests of trainer.py and train.py: complete runs in real processes that stop, resume and skip steps."""

import os
import signal
import time
from itertools import count, pairwise
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from tests.support.runs import Ranks, losses, options, rows, train, wait_for_step
from tests.support.trainers import open_trainer, train_all
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.config import load_config
from torchtitan_clone.data import open_dataset
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.run.preflight import resolve
from torchtitan_clone.run.state import TrainingError


def test_the_loss_falls_and_a_complete_run_can_be_extended(corpus, tmp_path):
    run = options(corpus, tmp_path, training__steps=40)
    code, output = train(run, log_folder=tmp_path)
    assert code == 0
    assert "training is complete: step 40 of 40" in output
    curve = losses(tmp_path)
    assert curve[40] < curve[1] - 1.0
    row = rows(tmp_path)[0]
    keys = (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "step_seconds",
        "data_seconds",
        "tokens_seen",
        "time",
    )
    assert not set(keys) - set(row)
    assert row["tokens_seen"] == 8 * 64
    code, output = train(run, log_folder=tmp_path)
    assert code == 0
    assert "is complete: step 40" in output
    code, output = train(options(corpus, tmp_path, training__steps=42), log_folder=tmp_path)
    assert code == 0
    assert list(losses(tmp_path)) == list(range(1, 43))


def test_stopped_and_killed_runs_resume_bit_exactly(corpus, tmp_path):
    def run(name):
        sizes = {"training__seq_len": 32, "model__args__n_layers": 1}
        return options(corpus, tmp_path / name, training__steps=30, checkpoint__interval=5, **sizes)

    common = {"world_size": 2, "log_folder": tmp_path}
    assert train(run("uninterrupted"), **common)[0] == 0
    expected = losses(tmp_path / "uninterrupted")
    assert list(expected) == list(range(1, 31))

    stopped = Ranks(run("stopped"), **common)
    wait_for_step(tmp_path / "stopped", 5)
    # One rank gets the signal; all must stop at the same step.
    stopped.signal(signal.SIGTERM, ranks=[1])
    code, output = stopped.wait()
    assert code == 0
    assert "stopped by" in output
    assert 5 <= max(losses(tmp_path / "stopped")) < 30
    code, output = train(run("stopped"), **common)
    assert code == 0
    assert "resumed after step" in output
    assert losses(tmp_path / "stopped") == expected

    killed = Ranks(run("killed"), **common)
    wait_for_step(tmp_path / "killed", 12)
    killed.signal(signal.SIGKILL)
    killed.join()
    assert 12 <= max(losses(tmp_path / "killed")) < 30
    code, output = train(run("killed"), **common)
    assert code == 0
    assert "resumed after step" in output
    assert losses(tmp_path / "killed") == expected
    assert list(losses(tmp_path / "killed")) == list(range(1, 31))


ALIKE = {
    "one": (1, {}),
    "accumulate": (
        1,
        {"training__local_batch_size": 1, "optimizer__implementation": "foreach", "debug__deterministic": True},
    ),
    "never+full ac": (2, {"parallelism__fsdp_reshard_after_forward": "never", "activation_checkpoint__mode": "full"}),
    "offload+always": (
        2,
        {"training__enable_cpu_offload": True, "parallelism__fsdp_reshard_after_forward": "always"},
    ),
}
"""Number of ranks and options of runs whose losses are equal."""


@pytest.fixture(scope="module")
def alike(corpus, tmp_path_factory):
    """Returns the rows of steps of all runs, of which those with as many ranks are trained in the same processes."""
    folder = tmp_path_factory.mktemp("alike")
    for ranks in (1, 2):
        argvs = {
            name: options(corpus, folder / name, **changes, training__steps=6, checkpoint__enable=False)
            for name, (world_size, changes) in ALIKE.items()
            if world_size == ranks
        }
        run_ranks(train_all, ranks, list(argvs.values()))
    return {name: [row for row in rows(folder / name) if "loss" in row] for name in ALIKE}


@pytest.mark.parametrize("name", list(ALIKE)[1:])
def test_data_parallel_losses_equal_those_of_one_rank(alike, name):
    for column, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected, found = ([row[column] for row in alike[run]] for run in ("one", name))
        assert len(expected) == 6
        assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.many_ranks
def test_a_run_resumes_on_another_number_of_ranks(corpus, tmp_path):
    for steps, world_size in ((2, 2), (4, 1), (6, 4)):
        argv = options(corpus, tmp_path, training__steps=steps, training__local_batch_size=2)
        code, output = train(argv, world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
    # The learning rate depends on training.steps, so only what does not is compared: the data and the tokens.
    assert [row["tokens_seen"] for row in rows(tmp_path) if "loss" in row] == [8 * 64 * step for step in range(1, 7)]


def test_diverging_training_stops_with_an_error(corpus, tmp_path):
    argv = options(corpus, tmp_path, optimizer__lr=1e30, training__steps=50, training__max_skipped_steps=3)
    code, output = train(argv, log_folder=tmp_path)
    assert code == 1
    assert "not finite for 4 steps in a row" in output
    assert "Traceback" not in output
    last = rows(tmp_path)[-1]
    assert last["step"] < 10


def test_training_from_the_resolved_config_repeats_the_run(corpus, tmp_path):
    assert train(options(corpus, tmp_path, checkpoint__enable=False), log_folder=tmp_path)[0] == 0
    expected = losses(tmp_path)
    resolved = tmp_path / "run" / "config.toml"
    again = [f"--job.config_file={resolved}", f"--job.dump_folder={tmp_path / 'again'}"]
    assert train(again, log_folder=tmp_path)[0] == 0
    assert losses(tmp_path / "again") == expected


def run_with_a_bad_step(argv, bad_step):
    """Trains with hidden states that turn to NaN in one step; returns a weight's values as each step sees them."""
    seen = []
    with open_trainer(argv) as trainer:
        steps = count(1)

        def poison(module, _, out):
            seen.append(local_shard(trainer.engine.parameters["output.weight"]).detach().clone())
            return out * float("nan") if next(steps) == bad_step and dist.get_rank() == 0 else out

        trainer.engine.model_parts[0].norm.register_forward_hook(poison)
        trainer.train()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(corpus, tmp_path, world_size):
    argv = options(corpus, tmp_path, training__local_batch_size=8 // world_size, training__steps=6)
    for seen in run_ranks(run_with_a_bad_step, world_size, argv, 3):
        changed = [not torch.equal(before, after) for before, after in pairwise(seen)]
        assert changed == [True, True, False, True, True]
    found = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["loss"] is None for row in found] == [False, False, True, False, False, False]
    assert [row["skipped_steps"] for row in found] == [0, 0, 1, 1, 1, 1]


def end_while_saving(argv, folder):
    """Trains until step 3 is not finite; the writer process of rank 0 is stopped for a second from step 2 on.

    Returns the steps that are saved when training has ended.
    """
    with open_trainer(argv) as trainer:
        steps = count(1)

        def strike(module, _, out):
            step = next(steps)
            if step == 2 and dist.get_rank() == 0:
                while (writer := trainer._checkpoints.writer_pid) is None:
                    time.sleep(0.01)
                os.kill(writer, signal.SIGSTOP)
                Timer(1, os.kill, (writer, signal.SIGCONT)).start()
            return out * float("nan") if step == 3 else out

        trainer.engine.model_parts[0].norm.register_forward_hook(strike)
        with pytest.raises(TrainingError, match="step 3: loss nan"):
            trainer.train()
        return committed_steps(Path(folder))


def test_a_save_in_progress_is_completed_when_training_diverges(corpus, tmp_path):
    changes = {"checkpoint__async_mode": "async_with_pinned_mem", "checkpoint__interval": 2}
    argv = options(corpus, tmp_path, training__local_batch_size=4, training__max_skipped_steps=0, **changes)
    assert run_ranks(end_while_saving, 2, argv, tmp_path / "run" / "checkpoint") == [[2], [2]]
    assert [row["step"] for row in rows(tmp_path) if row.get("event") == "checkpoint saved"] == [2]


def test_an_error_that_one_rank_finds_is_printed(corpus, tmp_path):
    """The rows that rank 1 reads are damaged: rank 0 loses its connection, and only rank 1 knows why."""
    changes = {"training__steps": 1, "training__local_batch_size": 1, "training__global_batch_size": 2}
    argv = options(corpus, tmp_path, data__cache_folder=tmp_path / "cache", **changes)
    config = load_config(argv)
    plan = resolve(config, world_size=2, device_type="cpu")
    dataset = open_dataset(training=config.training, data=config.data, tokenizer=plan.tokenizer, mixture=plan.mixture)
    loader, _ = open_loaders(plan, dataset=dataset, rank=1, position=None)
    row = next(loader).tokens_BT[0].numpy()
    tokens = np.memmap(dataset.store.folder / "train.tokens", dtype=np.uint16, mode="r+")
    (start,) = (i for i in np.flatnonzero(tokens == row[0]) if np.array_equal(tokens[i : i + len(row)], row))
    tokens[start + 1] = 65535
    tokens.flush()
    run = Ranks(argv, world_size=2, log_folder=tmp_path / "logs")
    run.join()
    assert "it holds token id 65535, and the tokenizer has" in (tmp_path / "logs" / "rank1.log").read_text()
