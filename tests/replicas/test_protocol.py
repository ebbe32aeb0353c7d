"""A run without replica groups, and without the package for them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.replicas import replica_context
from torchtitan_clone import doors
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.replicas.protocol import (
    RecoveryState,
    join_replica_group,
    outer_state,
    replica_groups,
)


def unused_state() -> RecoveryState:
    """A single replica has no peer to recover from."""
    raise AssertionError("the state was asked for")


def test_a_single_replica_commits_every_step_unchanged():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    context = replace(replica_context({"w": parameter}, folder=Path("unused")), recovery_state=unused_state)
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
    assert outer_state(FaultTolerance(semi_sync_method="diloco"), parameters={"w": parameter}) == {}


def test_without_the_package_replica_groups_are_one_config_error(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_CLONE_TORCHFT", "0")
    assert doors.find("torchft") is None
    with pytest.raises(ConfigError) as error:
        replica_groups()
    assert str(error.value) == (
        "fault_tolerance.enable: $TORCHTITAN_CLONE_TORCHFT = 0 closes the package torchtitan_clone.torchft; unset it; "
        "or set it to false"
    )
    monkeypatch.delenv("TORCHTITAN_CLONE_TORCHFT")
    assert replica_groups() is doors.find("torchft")
