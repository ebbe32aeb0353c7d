"""Locks of run folders; tests/attacks/test_run_folder.py has those of complete runs."""

import os
import time
from pathlib import Path

import pytest

from tests.marks import needs_door
from tests.support.harness import run_ranks
from tests.support.runs import options, train
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.run import preflight
from torchtitan_clone.run.folder import LOCK_FILE, RunFolder


def lock_as(argv: list[str], replica_ids: list[int], run_names: list[str]) -> str:
    """Locks the folder as one of two processes, of a replica group or, below 0, of a run without; why it is refused."""
    rank = int(os.environ["RANK"])
    argv = [*argv, f"--job.run_name={run_names[rank]}"]
    group = [f"--fault_tolerance.replica_id={replica_ids[rank]}", "--fault_tolerance.enable"]
    config = load_config([*argv, *(group if replica_ids[rank] >= 0 else [])])
    folder = RunFolder(preflight.resolve(config, world_size=1, device_type="cpu"))
    try:
        folder.lock()
    except ConfigError as error:
        return str(error)
    (Path(config.job.dump_folder) / f"locked{rank}").touch()
    time.sleep(3)  # longer than the other process waits
    return ""


@pytest.mark.parametrize(
    ("replica_ids", "refused"),
    [
        pytest.param([0, 1], "", marks=needs_door("torchft")),
        pytest.param([1, 1], "run/replica-1", marks=needs_door("torchft")),
        pytest.param([-1, 1], "run", marks=needs_door("torchft")),
        ([-1, -1], "run"),
    ],
)
def test_replica_groups_exclude_their_like_and_a_run_without(corpus, tmp_path, replica_ids, refused):
    argv = options(corpus, tmp_path, fault_tolerance__group_size=2)
    answers = run_ranks(lock_as, 2, argv, replica_ids, ["run", "run"])
    assert answers.count("") == (1 if refused else 2), answers
    assert not refused or f"the folder {tmp_path / refused} is in use by process" in max(answers)


@pytest.mark.parametrize(
    ("replica_ids", "values", "is_refused"),
    [
        ([-1, -1], {}, True),
        pytest.param([0, 1], {}, False, marks=needs_door("torchft")),
        pytest.param([-1, 1], {}, True, marks=needs_door("torchft")),
        ([-1, -1], {"load_only": True}, False),
    ],
)
def test_two_runs_cannot_write_to_one_folder_of_checkpoints(corpus, tmp_path, replica_ids, values, is_refused):
    folder = tmp_path / "checkpoints"
    values = {f"checkpoint__{name}": value for name, value in (values | {"folder": folder}).items()}
    argv = options(corpus, tmp_path, fault_tolerance__group_size=2, **values)
    names = ["first", "second" if replica_ids[0] < 0 else "first"]
    answers = run_ranks(lock_as, 2, argv, replica_ids, names)
    assert answers.count("") == (1 if is_refused else 2), answers
    if is_refused:
        assert f"the folder {folder} is in use by process" in max(answers)
        assert max(answers).endswith("or choose another checkpoint.folder")


@needs_door("torchft")
def test_a_replica_group_recreates_the_lock_of_the_run(corpus, tmp_path):
    config = load_config(options(corpus, tmp_path, fault_tolerance__enable=True, fault_tolerance__group_size=2))
    folder = RunFolder(preflight.resolve(config, world_size=1, device_type="cpu"))
    folder.lock()
    (tmp_path / "run" / LOCK_FILE).unlink()
    folder.ensure()
    assert (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.parametrize("is_load_only", [False, True])
def test_checkpoints_of_another_run_are_not_written_to(corpus, tmp_path, is_load_only):
    (tmp_path / "other" / "checkpoint").mkdir(parents=True)
    (tmp_path / "other" / LOCK_FILE).touch()
    argv = options(corpus, tmp_path, checkpoint__folder="../other/checkpoint", checkpoint__load_only=is_load_only)
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    if is_load_only:
        preflight.check_start(plan)
        return
    with pytest.raises(ConfigError, match=r"is in the folder of the run .*other.*, whose checkpoints would be deleted"):
        preflight.check_start(plan)


def test_an_export_folder_that_is_a_file_is_an_error_before_training(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").touch()
    argv = options(corpus, tmp_path, checkpoint__last_save_in_hf=True)
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    with pytest.raises(ConfigError, match=r"nothing can be written to .*/run/hf"):
        preflight.check_start(plan)


def test_a_damaged_configuration_of_the_folder_is_named(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=1)
    assert train(argv, log_folder=tmp_path)[0] == 0
    (tmp_path / "run" / "config.toml").write_text("[model")
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    with pytest.raises(
        ConfigError, match=r"run/config\.toml is damaged: .*; delete it, or choose another job\.run_name"
    ):
        preflight.check_start(plan)
