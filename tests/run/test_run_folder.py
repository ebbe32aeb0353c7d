"""Locks of run folders; tests/attacks/test_run_folder.py has those of complete runs."""

import os
import time
from pathlib import Path

import pytest

from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.run import preflight
from torchtitan_clone.run.run_folder import RunFolder
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options


def lock_as(argv: list[str], replica_ids: list[int]) -> str:
    """Locks the folder of a replica group as one of two processes; returns why it is refused, or nothing."""
    rank = int(os.environ["RANK"])
    config = load_config([*argv, f"--fault_tolerance.replica_id={replica_ids[rank]}"])
    folder = RunFolder(preflight.resolve(config, world_size=1, device_type="cpu"))
    try:
        folder.lock()
    except ConfigError as error:
        return str(error)
    (Path(config.job.dump_folder) / f"locked{rank}").touch()
    time.sleep(3)  # longer than the other process waits
    return ""


@pytest.mark.parametrize(("replica_ids", "refused"), [([0, 1], 0), ([1, 1], 1)])
def test_every_replica_group_has_a_lock_of_its_own(corpus, tmp_path, replica_ids, refused):
    argv = options(corpus, tmp_path, fault_tolerance__enable=True, fault_tolerance__group_size=2)
    answers = run_ranks(lock_as, 2, argv, replica_ids)
    assert sum("replica-1 is in use by process" in answer for answer in answers) == refused, answers
    assert answers.count("") == 2 - refused
