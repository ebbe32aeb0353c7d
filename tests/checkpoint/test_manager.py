"""What a run saves, keeps, exports and resumes from."""

import shutil
import signal

import pytest
import torch

from tests.support.checkpoint_states import SlowState, read_tensors, save
from tests.support.harness import run_ranks
from tests.support.runs import Ranks, losses, options, rows, train, wait_for_step
from tests.support.trainers import open_trainer
from torchtitan_clone.checkpoint.folder import committed_steps, finished_step
from torchtitan_clone.trainer import Trainer

ASYNC_MODES = ("async", "async_with_pinned_mem")


def test_the_newest_complete_and_the_permanent_steps_are_kept(tmp_path):
    save(tmp_path, [2, 4, 6, 8, 10], keep_latest_k=2, keep_every=4)
    assert committed_steps(tmp_path) == [4, 8, 10]
    (tmp_path / "step-10" / "index.json").unlink()
    save(tmp_path, [11], keep_latest_k=1, keep_every=4)
    # Step 10 is corrupted: it is neither counted nor deleted.
    assert committed_steps(tmp_path) == [4, 8, 10, 11]


def test_a_failed_deletion_of_old_steps_does_not_fail_the_save(tmp_path):
    (tmp_path / "step-1.purged").write_text("in the way")
    reports = save(tmp_path, [1, 2, 3], keep_latest_k=2)
    assert [report.error for report in reports] == [None, None, None]
    assert committed_steps(tmp_path) == [1, 2, 3]


def test_a_run_that_is_killed_anywhere_resumes_bit_identically(corpus, tmp_path):
    def run(name, **changes):
        common = {"training__steps": 40, "checkpoint__interval": 3, "checkpoint__async_mode": ASYNC_MODES[-1]}
        common |= {"training__seq_len": 32, "model__args__n_layers": 1}
        return options(corpus, tmp_path / name, **common | changes)

    common = {"world_size": 2, "log_folder": tmp_path}
    assert train(run("uninterrupted", checkpoint__enable=False), **common)[0] == 0
    for step in (4, 14, 25):
        killed = Ranks(run("killed"), **common)
        wait_for_step(tmp_path / "killed", step)
        killed.signal(signal.SIGKILL)
        killed.join()
    code, output = train(run("killed"), **common)
    assert code == 0, output
    assert "resumed after step" in output
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")
    saved = [row for row in rows(tmp_path / "killed") if row.get("event") == "checkpoint saved"]
    assert saved[-1]["step"] == 40
    assert all(row["bytes"] > 1e6 and row["staging_seconds"] > 0 for row in saved)


def test_a_complete_run_is_reported_even_without_its_checkpoints(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=2)
    assert train(argv, log_folder=tmp_path)[0] == 0
    folder = tmp_path / "run" / "checkpoint"
    assert finished_step(folder) == 2
    shutil.rmtree(folder / "step-2")
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0
    assert "is complete: step 2" in output


def test_the_last_step_is_also_exported_as_weights_only(corpus, tmp_path):
    changes = {
        "training__steps": 3, "checkpoint__enable_first_step_checkpoint": True, "checkpoint__keep_every": 2,
        "checkpoint__last_save_model_only": True, "checkpoint__export_dtype": "bfloat16",
    }  # fmt: skip
    assert train(options(corpus, tmp_path, **changes), log_folder=tmp_path)[0] == 0
    folder = tmp_path / "run" / "checkpoint"
    assert committed_steps(folder) == [1, 2, 3]
    assert committed_steps(folder / "model_only") == [3]
    exported = read_tensors(folder / "model_only" / "step-3")
    complete = read_tensors(folder / "step-3")
    assert exported
    assert all(name.startswith("model/") for name in exported)
    for name, tensor in exported.items():
        assert torch.equal(tensor, complete[name].to(torch.bfloat16))


def test_a_run_starts_from_its_seed_checkpoint(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=3)
    code, output = train([*argv, "--checkpoint.create_seed_checkpoint"], log_folder=tmp_path)
    assert (code, "the initial state is saved as step 0" in output) == (0, True)
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    assert code == 0, output
    assert "resumed after step 0" in output
    seeded = losses(tmp_path)
    assert train(options(corpus, tmp_path / "plain", training__steps=3), world_size=2, log_folder=tmp_path)[0] == 0
    assert seeded == losses(tmp_path / "plain")


def test_load_only_saves_nothing(corpus, tmp_path):
    assert train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)[0] == 0
    argv = options(corpus, tmp_path, training__steps=4, checkpoint__load_only=True, checkpoint__interval=1)
    code, output = train(argv, log_folder=tmp_path)
    assert (code, "resumed after step 2" in output) == (0, True)
    assert committed_steps(tmp_path / "run" / "checkpoint") == [2]


class SlowlyCopiedTrainer(Trainer):
    """A trainer whose state takes longer to copy than a step, also on a busy machine."""

    def state_tensors(self):
        return SlowState(super().state_tensors(), seconds=0.5)


def train_with_slow_copies(argv):
    """Trains all steps of a run."""
    with open_trainer(argv, trainer=SlowlyCopiedTrainer) as trainer:
        trainer.train()


@pytest.fixture(scope="module")
def weights_by_step(corpus, tmp_path_factory):
    """Returns a weight after each of five steps of two ranks, where training waits for every save."""
    folder = tmp_path_factory.mktemp("weights")
    changes = {"checkpoint__async_mode": "disabled", "checkpoint__interval": 1, "checkpoint__keep_latest_k": 0}
    argv = options(corpus, folder, training__steps=5, **changes)
    assert train(argv, world_size=2, log_folder=folder)[0] == 0
    return {step: saved_weight(folder, step) for step in range(1, 6)}


def saved_weight(folder, step):
    (weight,) = read_tensors(folder / "run" / "checkpoint" / f"step-{step}", ["model/output.weight"]).values()
    return weight


@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_the_trainer_changes_no_weight_before_it_is_copied(corpus, weights_by_step, tmp_path, mode):
    changes = {"checkpoint__async_mode": mode, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 0}
    run_ranks(train_with_slow_copies, 2, options(corpus, tmp_path, training__steps=5, **changes))
    steps = committed_steps(tmp_path / "run" / "checkpoint")
    assert len(steps) > 1
    for step in steps:
        assert torch.equal(saved_weight(tmp_path, step), weights_by_step[step])
        assert step == 5 or not torch.equal(weights_by_step[step], weights_by_step[step + 1])


def test_all_exports_of_weights_are_kept(corpus, tmp_path):
    changes = {"checkpoint__last_save_model_only": True, "checkpoint__keep_latest_k": 1}
    for steps in (2, 4):
        assert train(options(corpus, tmp_path, training__steps=steps, **changes), log_folder=tmp_path)[0] == 0
    folder = tmp_path / "run" / "checkpoint"
    assert (committed_steps(folder), committed_steps(folder / "model_only")) == ([4], [2, 4])


def test_a_run_that_does_not_save_starts_from_a_checkpoint_too(corpus, tmp_path):
    assert train(options(corpus, tmp_path / "first", training__steps=20), log_folder=tmp_path)[0] == 0
    first = tmp_path / "first" / "run" / "checkpoint"
    changes = {"checkpoint__enable": False, "checkpoint__initial_load_path": first, "optimizer__lr": 1e-9}
    code, output = train(options(corpus, tmp_path / "second", training__steps=2, **changes), log_folder=tmp_path)
    assert (code, f"loaded model from {first / 'step-20'}" in output) == (0, True), output
    assert losses(tmp_path / "second")[1] < losses(tmp_path / "first")[1] - 0.5
    assert not (tmp_path / "second" / "run" / "checkpoint").exists()
