"""Which steps are saved, and which of these are permanent."""

import pytest

from torchtitan_clone.checkpoint.commit import committed_steps
from torchtitan_clone.checkpoint.policy import SavePolicy
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.testing.runs import options, train


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


def test_a_save_restarts_the_clock():
    assert not SavePolicy(Checkpoint()).is_overdue()
    assert SavePolicy(Checkpoint(interval_minutes=0.0)).is_overdue()
    policy = SavePolicy(Checkpoint(interval_minutes=1e6))
    assert not policy.is_overdue()
    policy.record_save()
    assert not policy.is_overdue()


def test_a_run_saves_when_the_minutes_are_over(corpus, tmp_path):
    changes = {"training__steps": 4, "checkpoint__interval_minutes": 1e-6}
    assert train(options(corpus, tmp_path, **changes), log_folder=tmp_path)[0] == 0
    assert committed_steps(tmp_path / "run" / "checkpoint") == [1, 2, 3, 4]
