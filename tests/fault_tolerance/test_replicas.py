"""Replica groups in real processes: they train what one run trains, and go on when one of them dies."""

import signal

import pytest

from tests.fault_tolerance.cluster import HEARTBEAT_MS, Cluster, committed_once
from tests.fault_tolerance.faults import Fault
from tests.runs import losses, options, train

ROWS = 12
STEPS = 60
SMALL = {"training__global_batch_size": ROWS, "training__steps": STEPS, "checkpoint__interval": 20}


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """The losses of one uninterrupted run."""
    folder = tmp_path_factory.mktemp("alone")
    assert train(options(corpus, folder, **SMALL), log_folder=folder)[0] == 0
    return losses(folder)


def check(cluster, expected) -> None:
    """All groups finished as one run would have, with the same bits, and each row was trained on once."""
    assert set(cluster.finished) == set(range(cluster.groups)), cluster.log
    assert {rank: len(found) for rank, found in cluster.digests.items()} == dict.fromkeys(range(cluster.ranks), 1)
    assert committed_once(cluster.records(), steps=STEPS, rows=ROWS) == []
    found = cluster.losses
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=1e-4), f"step {step}"


def test_two_groups_go_on_when_one_is_killed_and_it_returns(corpus, tmp_path, expected):
    faults = [Fault(kind="kill", place="between", step=15, group=1)]
    with Cluster(corpus, tmp_path, groups=2, **SMALL) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(1, [-signal.SIGKILL])]
        assert "healed from another replica group: step" in cluster.log_of(1)
        assert "neither is a majority" in cluster.log_of(0)
        assert cluster.stalls(0)[0] < HEARTBEAT_MS / 1000 + 2
