"""Replica groups in real processes: they train what one run trains, and go on when one of them dies."""

import signal
import socket
import sys

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.protocol import check_replicas
from torchtitan_clone.testing.cluster import HEARTBEAT_MS, Cluster, committed_once
from torchtitan_clone.testing.faults import Fault
from torchtitan_clone.testing.runs import losses, options, train

ROWS = 12
STEPS = 60
SMALL = {
    "training__global_batch_size": ROWS,
    "training__local_batch_size": 2,
    "training__steps": STEPS,
    "checkpoint__interval": 20,
}


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """The losses of one uninterrupted run."""
    folder = tmp_path_factory.mktemp("alone")
    assert train(options(corpus, folder, **SMALL), log_folder=folder)[0] == 0
    return losses(folder)


def check(cluster, expected, *, steps=STEPS) -> None:
    """All groups finished as one run would have, with the same bits, and each row was trained on once."""
    assert set(cluster.finished) == set(range(cluster.groups)), cluster.log
    assert {rank: len(found) for rank, found in cluster.digests().items()} == dict.fromkeys(range(cluster.ranks), 1)
    assert committed_once(cluster.records(), steps=steps, rows=ROWS) == []
    assert cluster.wrong_rows() == []
    for step, loss in cluster.losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-3), f"step {step}"


def died(cluster) -> list[int]:
    """The groups that died, in order."""
    return [group for _, group, _ in cluster.deaths]


def test_two_groups_go_on_when_one_is_killed_or_hangs_and_it_returns(corpus, tmp_path, expected):
    faults = [
        Fault(kind="kill", place="between", step=15, group=1),
        Fault(kind="hang", place="forward", step=40, group=1),
    ]
    with Cluster(corpus, tmp_path, groups=2, **{**SMALL, "fault_tolerance__stall_factor": 5}) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(1, [-signal.SIGKILL]), (1, [1])]
        assert "healed from another replica group: step" in cluster.log_of(1)
        assert "neither is a majority" in cluster.log_of(0)
        killed = next(stall for stall in cluster.stalls(0) if stall.start < cluster.deaths[0][0] < stall.end)
        assert killed.seconds < HEARTBEAT_MS / 1000 + 2, cluster.timeline(killed)


def test_kills_everywhere_lose_no_row_and_no_survivor(corpus, tmp_path, expected):
    """The rank that sends to rank 1 of the group that returns last dies when rank 0 of that has all it needs."""
    faults = [
        Fault(kind="kill", place="all_reduce", step=8, group=1, rank=1),
        Fault(kind="kill", place="heal_target", step=8, group=1, rank=0, returning=True),
        Fault(kind="kill", place="committed", step=24, group=0, rank=0),
        Fault(kind="late", place="heal_source", step=25, group=1, rank=1),
        Fault(kind="exception", place="forward", step=48, group=2, rank=1),
    ]
    with Cluster(corpus, tmp_path, groups=3, ranks=2, **SMALL) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        assert died(cluster)[:3] == [1, 1, 0]
        # The rank that has not raised ends because the other has.
        assert any(group == 2 and codes[1] == 1 for _, group, codes in cluster.deaths)
        assert len(cluster.deaths) == cluster.log.count("fault: ")


def test_what_does_not_kill_is_repeated_or_ended(corpus, tmp_path, expected):
    """A gradient that is not finite, an exception, a process that hangs while its heart beats."""
    faults = [
        Fault(kind="nan", place="gradients", step=10, group=1),
        Fault(kind="exception", place="forward", step=20, group=0),
        Fault(kind="hang", place="forward", step=40, group=2),
    ]
    changes = {**SMALL, "fault_tolerance__stall_factor": 5}
    with Cluster(corpus, tmp_path, groups=3, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(0, [1]), (2, [1])]
        for group in range(3):
            assert "step 10: loss" in cluster.log_of(group)
        assert "the step is repeated: loss or gradient is not finite" in cluster.log
        assert "RuntimeError: injected" in cluster.log_of(0)
        assert "Timeout (0:00:" not in cluster.log_of(0)  # it ends at once
        assert "Timeout (0:00:" in cluster.log_of(2)  # faulthandler's, with the stacks below
        assert "in strike" in cluster.log_of(2)


def test_all_die_and_go_on_from_disk_and_who_comes_late_has_nothing_to_do(corpus, tmp_path, expected):
    """Before that one dies in a sum, and again while the others wait for it to connect: they stall for its heart only.

    Group 1 comes back first and trains steps again that the others had committed: these must forget them.
    """
    last = {"kind": "kill", "group": 1, "step": 8}
    faults = [Fault(place="all_reduce", **last), Fault(place="configure", returning=True, **last)]
    timeouts = {"fault_tolerance__process_group_timeout_ms": 5000, "fault_tolerance__join_timeout_ms": 6000}
    with Cluster(corpus, tmp_path, groups=3, pace=0.04, **SMALL, **timeouts) as cluster:
        cluster.start_all(faults=faults).watch_over(until=lambda: min(map(cluster.step_of, range(3))) > 22)
        assert died(cluster) == [1, 1]
        assert cluster.stalls(0, 2)[0].seconds < HEARTBEAT_MS / 1000 + 2, cluster.timeline(cluster.stalls(0, 2)[0])
        cluster.kill(0, 1, 2)
        assert max(map(cluster.step_of, range(3))) < STEPS
        cluster.start(1)
        cluster.watch_over(until=lambda: cluster.step_of(1) > 26)
        cluster.start(0)
        cluster.start(2)
        cluster.watch_over()
        check(cluster, expected)
        assert "resumed after step 20" in cluster.log_of(0)
        cluster.start(1)
        cluster.watch_over()
        assert cluster.finished[1] == [0]
        assert "is complete: step 60" in cluster.log_of(1)


def test_too_few_groups_wait_and_the_lighthouse_may_be_away_or_ask_for_less(corpus, tmp_path, expected):
    """It comes back with a minimum of its own: then it is the group that sees that they are too few."""
    changes = {**SMALL, "fault_tolerance__min_replica_size": 2, "comm__train_timeout_seconds": 4}
    faults = [
        Fault(kind="kill", place="commit", step=15, group=1),
        Fault(kind="kill", place="between", step=40, group=1),
    ]
    with Cluster(corpus, tmp_path, groups=2, revive_seconds=2.5, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over(until=lambda: cluster.step_of(0) > 25)
        assert "waiting for replica groups" in cluster.log_of(0)
        assert cluster.stalls(0)[0].seconds > 2
        cluster.least = 1
        cluster.restart_lighthouse(seconds=5)
        cluster.watch_over()
        check(cluster, expected)
        assert died(cluster) == [1, 1]
        assert "1 are there, fault_tolerance.min_replica_size = 2; the lighthouse was started with a" in cluster.log
        attempts = [line for line in cluster.records()["replica-0/rows.rank0.jsonl"] if "rows" in line]
        assert len(attempts) <= STEPS + 4  # nothing is fed while it is alone
        assert "nothing has moved" not in cluster.log  # to wait is no hang


def test_a_group_with_other_options_or_the_number_of_another_is_sent_away(corpus, tmp_path):
    """Two have one number also where a group was taken for dead, and replaced, that had only stood still."""
    with Cluster(corpus, tmp_path, groups=2, pace=0.03, **{**SMALL, "training__steps": 80}) as cluster:

        def is_sent_away(group) -> bool:
            cluster.watch_over(until=lambda: group.codes != [None])
            return group.codes == [2]

        cluster.start(0)
        cluster.watch_over(until=lambda: cluster.step_of(0) > 5)
        cluster.env["TORCHFT_TIMEOUT_SEC"] = "5"
        for group, changes in {1: {"optimizer__lr": 1e-4}, 2: {"fault_tolerance__replica_id": 0}}.items():
            cluster.start(group, **changes)
            assert is_sent_away(cluster.running.pop(group))
        assert "error: replica groups were started with different options" in cluster.log_of(1)
        assert "$TORCHFT_TIMEOUT_SEC = 5 outranks fault_tolerance.process_group_timeout_ms" in cluster.log_of(1)
        same = "error: two replica groups run with the same number: fault_tolerance.replica_id = "
        assert f"{same}[0, 0]" in cluster.log_of(2)
        del cluster.env["TORCHFT_TIMEOUT_SEC"]
        cluster.start(1)
        cluster.watch_over(until=lambda: cluster.log_of(1).count("healed from another") == 1)
        cluster.running[1].signal(signal.SIGSTOP)
        cluster.start(2, fault_tolerance__replica_id=1)
        cluster.watch_over(until=lambda: "healed from another" in cluster.log_of(2))
        old = cluster.running.pop(1)
        old.signal(signal.SIGCONT)
        assert is_sent_away(old)
        assert f"{same}[0, 1, 1]" in cluster.log_of(1)
        cluster.watch_over()
        assert cluster.finished == {0: [0], 2: [0]}
        assert cluster.step_of(0) == 80


def test_what_a_machine_lacks_is_told_before_anything_starts(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no such family")

    enabled = FaultTolerance(enable=True, group_size=2)
    check_replicas(enabled, lighthouse="http://here:1")
    check_replicas(FaultTolerance(), lighthouse=None)
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ConfigError) as error:
        check_replicas(enabled, lighthouse=None)
    for said in (
        'pip install "torchtitan_clone[ft]"',
        "$TORCHFT_LIGHTHOUSE is not set; start scripts/lighthouse.py",
        "nowhere.invalid does not resolve; add it to /etc/hosts",
        "torchft's servers listen on IPv6",
    ):
        assert said in str(error.value)
