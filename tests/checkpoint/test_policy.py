"""Which steps are saved, kept, gone on from and left alone."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.states import (
    SHAPES,
    load,
    make_state,
    manager_of,
    rank_of_a_group,
    save,
    step_of,
    whole,
)
from torchtitan_clone.checkpoint.commit import committed_steps, finished_step
from torchtitan_clone.checkpoint.loading import read_tensors
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import Ranks, losses, options, rows, train, wait_for_step

SCRIPTS = Path(__file__).parents[2] / "scripts"
ASYNC = ("async", "async_with_pinned_mem")


def test_the_newest_whole_steps_and_the_permanent_ones_stay(tmp_path):
    save(tmp_path, [2, 4, 6, 8, 10], keep_latest_k=2, keep_every=4)
    assert committed_steps(tmp_path) == [4, 8, 10]
    (tmp_path / "step-10" / "index.json").unlink()
    save(tmp_path, [11], keep_latest_k=1, keep_every=4)
    # 10 is damaged: it neither counts nor goes.
    assert committed_steps(tmp_path) == [4, 8, 10, 11]


def test_old_steps_that_cannot_be_deleted_cost_no_save(tmp_path):
    (tmp_path / "step-1.purged" / "in the way").mkdir(parents=True)
    reports = save(tmp_path, [1, 2, 3], keep_latest_k=2)
    assert [report["error"] for report in reports] == [None, None, None]
    assert committed_steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("mode", ASYNC)
def test_killed_at_any_point_it_goes_on_to_the_last_bit(corpus, tmp_path, mode):
    def run(name, **changes):
        changes = {"training__steps": 40, "checkpoint__interval": 3, "checkpoint__async_mode": mode, **changes}
        return options(corpus, tmp_path / name, **changes)

    common = {"world_size": 2, "log_folder": tmp_path}
    assert train(run("whole", checkpoint__enable=False), **common)[0] == 0
    for step in (4, 14, 25):
        killed = Ranks(run("killed"), **common)
        wait_for_step(tmp_path / "killed", step)
        killed.signal(signal.SIGKILL)
        killed.join()
    code, output = train(run("killed"), **common)
    assert code == 0, output
    assert "resumed after step" in output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    saved = [row for row in rows(tmp_path / "killed") if row.get("event") == "checkpoint saved"]
    assert saved[-1]["step"] == 40
    assert all(row["bytes"] > 1e6 and row["staging_seconds"] > 0 for row in saved)


def test_a_damaged_step_is_passed_over_by_a_run_and_its_data_follow(corpus, tmp_path):
    def run(name, steps=12):
        changes = {"training__steps": steps, "lr_scheduler__decay_ratio": 0.01, "checkpoint__interval": 4}
        return options(corpus, tmp_path / name, **changes)

    assert train(run("whole"), log_folder=tmp_path)[0] == 0
    assert train(run("damaged", steps=8), world_size=2, log_folder=tmp_path)[0] == 0
    folder = tmp_path / "damaged" / "run" / "checkpoint"
    part = folder / "step-8" / "rank-1.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    code, output = train(run("damaged"), world_size=2, log_folder=tmp_path)
    assert code == 0, output
    assert "the checkpoint of step 8 is damaged: rank-1.safetensors has another digest" in output
    assert "resumed after step 4" in output
    assert losses(tmp_path / "damaged")[12] == pytest.approx(losses(tmp_path / "whole")[12], rel=1e-4)
    for step in folder.glob("step-*"):
        (step / "manifest.json").unlink()
    (folder / "finished.json").unlink()
    code, output = train(run("damaged"), world_size=2, log_folder=tmp_path)
    assert code == 2
    assert "none of them is whole" in output
    assert "Traceback" not in output


def test_a_finished_run_says_so_even_without_its_checkpoints(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=2)
    assert train(argv, log_folder=tmp_path)[0] == 0
    folder = tmp_path / "run" / "checkpoint"
    assert finished_step(folder) == 2
    shutil.rmtree(folder / "step-2")
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0
    assert "is complete: step 2" in output


def test_the_first_step_an_export_and_time(corpus, tmp_path):
    changes = {
        "training__steps": 3, "checkpoint__enable_first_step_checkpoint": True, "checkpoint__keep_every": 2,
        "checkpoint__last_save_model_only": True, "checkpoint__export_dtype": "bfloat16",
    }  # fmt: skip
    assert train(options(corpus, tmp_path / "a", **changes), log_folder=tmp_path)[0] == 0
    folder = tmp_path / "a" / "run" / "checkpoint"
    assert committed_steps(folder) == [1, 2, 3]
    assert committed_steps(folder / "model_only") == [3]
    exported, complete = read_tensors(folder / "model_only" / "step-3"), read_tensors(folder / "step-3")
    assert all(name.startswith("model/") for name in exported)
    for name, tensor in exported.items():
        assert torch.equal(tensor, complete[name].to(torch.bfloat16))
    changes = {"training__steps": 4, "checkpoint__interval_minutes": 1e-6}
    assert train(options(corpus, tmp_path / "b", **changes), log_folder=tmp_path)[0] == 0
    assert committed_steps(tmp_path / "b" / "run" / "checkpoint") == [1, 2, 3, 4]


def test_a_seed_checkpoint_is_what_a_run_starts_with(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=3)
    code, output = train([*argv, "--checkpoint.create_seed_checkpoint"], log_folder=tmp_path)
    assert (code, "the initial state is saved as step 0" in output) == (0, True)
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    assert code == 0, output
    assert "resumed after step 0" in output
    seeded = losses(tmp_path)
    assert train(options(corpus, tmp_path / "plain", training__steps=3), world_size=2, log_folder=tmp_path)[0] == 0
    assert seeded == losses(tmp_path / "plain")


def resume_each(folder, choices):
    """A rank that resumes with each of these options: progress, and the step of the weights and of the rest."""
    found = []
    with rank_of_a_group():
        for chosen in choices:
            state = make_state(step=0)
            manager = manager_of(**{"folder": folder, "state": state, **chosen})
            progress = manager.find()
            manager.load()
            parts = [{n: t for n, t in state.items() if n.startswith(group)} for group in ("model/", "optimizer/")]
            vector = {"model/vector": state["model/vector"]}
            counts = state["optimizer/counts"]
            step = next(s for s in range(20) if torch.equal(counts, whole("optimizer/counts", step=s)))
            found.append((progress, step_of(parts[0]), step_of(vector), step))
    return found


def test_what_is_loaded_can_be_chosen(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    save(run, [5, 10, 15])
    choices = [
        {"exclude_from_loading": ["optimizer", "data"]},
        {"exclude_from_loading": ["model/vector"]},
        {"folder": other, "initial_load_path": str(run)},
        {"folder": other, "initial_load_path": str(run / "step-10"), "initial_load_model_only": False},
        {"load_step": 10},
    ]
    (answers,) = run_ranks(resume_each, 1, run, choices)
    steps = [(progress and progress.step, model, rest) for progress, model, _, rest in answers]
    assert steps == [(15, 15, 0), (15, None, 15), (None, 15, 0), (10, 10, 10), (10, 10, 10)]
    assert [progress.data for progress, *_ in answers[:2]] == [{}, {"samples": 120}]
    assert answers[1][2] == 0
    assert not other.exists()
    assert sorted(path.name for path in run.iterdir()) == ["step-10", "step-15.left-for-step-10", "step-5"]
    assert "has no whole checkpoint of it" in (load(run, load_step=15).error or "")


def test_load_only_saves_nothing(corpus, tmp_path):
    assert train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)[0] == 0
    argv = options(corpus, tmp_path, training__steps=4, checkpoint__load_only=True, checkpoint__interval=1)
    code, output = train(argv, log_folder=tmp_path)
    assert (code, "resumed after step 2" in output) == (0, True)
    assert committed_steps(tmp_path / "run" / "checkpoint") == [2]


def checkpoint_script(*arguments):
    """scripts/checkpoint.py; its exit code and what it prints."""
    command = [sys.executable, SCRIPTS / "checkpoint.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_script_lists_verifies_shows_and_prunes(tmp_path):
    save(tmp_path, [5, 10, 15], world_size=2)
    code, text = checkpoint_script("list", tmp_path)
    assert (code, text.count("whole")) == (0, 3)
    part = tmp_path / "step-10" / "rank-0.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert checkpoint_script("list", tmp_path)[0] == 0
    code, text = checkpoint_script("verify", tmp_path)
    assert (code, text.count("verified")) == (1, 2)
    assert "DAMAGED: rank-0.safetensors has another digest" in text
    code, text = checkpoint_script("show", tmp_path)
    assert code == 0
    assert all(name in text for name in SHAPES)
    assert json.loads(text[text.index("{") : text.index("}") + 1])["ranks"] == 2
    code, text = checkpoint_script("prune", tmp_path, "--keep_latest_k=1")
    assert (code, text) == (0, "deleted step 5\ndeleted step 10\n")
    assert checkpoint_script("prune", tmp_path, "--keep_latest_k=0")[0] == 2
