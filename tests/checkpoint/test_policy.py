"""Tests of manager.py: which steps are saved, and which of these are permanent."""

import pytest

from tests.support.runs import options, train
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.checkpoint.manager import SavePolicy
from torchtitan_clone.config.schema import Checkpoint


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"interval": 4}, [4, 8]),
        ({"interval": 4, "keep_every": 3}, [3, 4, 6, 8, 9]),
        ({"interval": 100, "enable_first_step_checkpoint": True}, [1]),
        ({"interval": 100}, []),
    ],
)
def test_the_options_decide_which_steps_are_saved(changes, expected):
    policy = SavePolicy(Checkpoint(**changes))
    assert [step for step in range(1, 11) if policy.is_due(step, overdue=False)] == expected
    assert all(policy.is_due(step, overdue=True) for step in range(1, 11))


def test_interval_minutes_are_counted_from_the_last_save():
    seconds = [0.0]
    policy = SavePolicy(Checkpoint(interval_minutes=2), clock=lambda: seconds[0])
    for start in (0.0, 1000.0):
        seconds[0] = start
        policy.record_save()
        seconds[0] = start + 119
        assert not policy.is_overdue()
        seconds[0] = start + 120
        assert policy.is_overdue()
    assert not SavePolicy(Checkpoint(), clock=lambda: seconds[0]).is_overdue()


def test_a_run_saves_when_the_minutes_are_over(corpus, tmp_path):
    changes = {"training__steps": 4, "checkpoint__interval_minutes": 1e-6}
    assert train(options(corpus, tmp_path, **changes), log_folder=tmp_path)[0] == 0
    assert committed_steps(tmp_path / "run" / "checkpoint") == [1, 2, 3, 4]
