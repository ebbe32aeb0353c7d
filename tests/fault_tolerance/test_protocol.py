"""A run without replica groups, and what replica groups require of a machine."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.protocol import (
    RecoveryState,
    ReplicaContext,
    check_replica_requirements,
    join_replica_group,
)


def unused_state() -> RecoveryState:
    """A single replica has no peer to recover from."""
    raise AssertionError("the state was asked for")


def test_a_single_replica_commits_every_step_unchanged():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    context = ReplicaContext(
        device=torch.device("cpu"),
        address="127.0.0.1",
        step=0,
        parameters={"w": parameter},
        outer_weights={},
        recovery_state=unused_state,
        sum_over_ranks=list,
        is_run_complete=bool,
        should_stop=bool,
        identity="",
        folder=Path("unused"),
    )
    group = join_replica_group(FaultTolerance(), run=context)
    assert (group.replica_index, group.num_replicas, group.is_writer) == (0, 1, True)
    assert group.begin_step()
    group.record_samples(range(4))
    assert group.sum([1.5, 2.5]) == [1.5, 2.5]
    group.sum_gradients([parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]
    assert group.commit(healthy=False)
    assert group.complete_step()
    assert group.rolled_back_steps() == set()
    group.close()
    assert not Path("unused").exists()


def test_all_missing_requirements_are_one_config_error(monkeypatch):
    enabled = FaultTolerance(enable=True, group_size=2)
    check_replica_requirements(enabled, lighthouse="http://here:1")
    check_replica_requirements(FaultTolerance(), lighthouse=None)
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError) as error:
        check_replica_requirements(enabled, lighthouse=None)
    for text in (
        'pip install "torchtitan_clone[ft]"',
        "$TORCHFT_LIGHTHOUSE is not set; start scripts/lighthouse.py",
    ):
        assert text in str(error.value)
