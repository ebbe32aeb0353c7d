"""A run without replica groups, and what replica groups require of a machine."""

import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.lighthouse import start_lighthouse
from torchtitan_clone.fault_tolerance.protocol import (
    RecoveryState,
    ReplicaContext,
    check_replica_requirements,
    join_replica_group,
)
from torchtitan_clone.testing.runs import options, train


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
        names=["w"],
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
    for port in ('"abc"', '"70000"'):
        monkeypatch.setenv("TORCHFT_MANAGER_PORT", port.strip('"'))
        with pytest.raises(ConfigError, match=rf"\$TORCHFT_MANAGER_PORT = {port}: must be an integer from 0 to 65,535"):
            check_replica_requirements(enabled, lighthouse="http://here:1")
    monkeypatch.delenv("TORCHFT_MANAGER_PORT")
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ConfigError) as error:
        check_replica_requirements(enabled, lighthouse=None)
    for text in (
        'pip install "torchtitan_clone[ft]"',
        "$TORCHFT_LIGHTHOUSE is not set; start scripts/lighthouse.py",
    ):
        assert text in str(error.value)


def test_a_port_of_the_manager_that_is_in_use_is_named(corpus, tmp_path):
    lighthouse = start_lighthouse(FaultTolerance(), port=0)
    argv = options(corpus, tmp_path, fault_tolerance__enable=True, fault_tolerance__group_size=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        env = {"TORCHFT_LIGHTHOUSE": lighthouse.url, "TORCHFT_MANAGER_PORT": str(port)}
        code, output = train(argv, log_folder=tmp_path, env=env)
    lighthouse.server.shutdown()
    assert code == 2
    rule = "this replica group cannot listen at 127.0.0.1: Address already in use; set it to a free port"
    assert f"error: $TORCHFT_MANAGER_PORT = {port}: {rule}" in output
    assert "Traceback" not in output
