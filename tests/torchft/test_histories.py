"""Replica groups compare histories, not numbers: tests of members.py and connection.py.

Every lighthouse is a process of its own, which is killed and started again at the same address.
"""

import errno
import fcntl
import os
import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn

from tests.support.checkpoint_states import rank_of_a_group
from tests.support.cluster import Cluster, committed_once
from tests.support.faults import Fault
from tests.support.harness import collect, start_ranks
from tests.support.replicas import replica_context
from tests.support.runs import read_json_lines
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.torchft.members import MAX_CHANGES, AttemptLog, History

ROWS = 4
SMALL = {
    "training__global_batch_size": ROWS,
    "training__seq_len": 32,
    "model__args__n_layers": 1,
    "checkpoint__interval": 20,
    "fault_tolerance__stall_factor": 1e6,  # a group that the test stops is not hung
}
LOCAL_SGD, ROUND = {"fault_tolerance__semi_sync_method": "local_sgd"}, 5


def check(cluster, *, steps: int, unit: int = 1, rows: int = ROWS) -> None:
    """Asserts that all groups finished with equal bits, and trained on each row once."""
    assert set(cluster.finished) == set(range(cluster.groups)), cluster.log
    assert {rank: len(found) for rank, found in cluster.digests("model/").items()} == dict.fromkeys(
        range(cluster.ranks), 1
    )
    assert committed_once(cluster.records(), steps=steps // unit, rows=rows * unit) == []


def committed_quorums(cluster, group: int, *, start: int) -> dict[int, int]:
    """Returns the quorum of each step that a group committed in one of its starts, counted from 0."""
    starts: list[dict[int, int]] = []
    for line in cluster.records()[f"replica-{group}/rows.rank0.jsonl"]:
        if "started" in line:
            starts.append({})
        elif line.get("committed"):
            starts[-1][line["step"]] = line["quorum"]
    return starts[start]


def test_steps_of_a_dropped_history_are_forgotten_with_another_lighthouse(corpus, tmp_path):
    """Both histories were in the first quorum of their lighthouse. While there is none, a restarted group waits."""
    steps = 50
    with Cluster(corpus, tmp_path, groups=2, pace=0.04, training__steps=steps, **SMALL) as cluster:
        cluster.start(0)
        cluster.watch_over(until=lambda: cluster.step_of(0) > 26)
        cluster.kill(0)
        dropped = committed_quorums(cluster, 0, start=0)
        cluster.start(1)
        cluster.watch_over(until=lambda: cluster.step_of(1) > 22)
        cluster.stop_lighthouse()
        cluster.start(0)
        left = len(lines_that(cluster, 1, "left"))
        # The other one has waited longer than process_group_timeout_ms, so the restarted one may not end before it.
        cluster.watch_over(until=lambda: len(lines_that(cluster, 1, "left")) > left + 3)
        assert cluster.running[0].codes == cluster.running[1].codes == [None]
        assert "waiting for the lighthouse at" in cluster.log_of(0)
        cluster.start_lighthouse_again()
        cluster.watch_over()
        check(cluster, steps=steps)
        assert cluster.deaths == []
        kept = committed_quorums(cluster, 1, start=0)
        both = set(dropped) & set(kept)
        assert len(both) > 2
        assert not [number for number in both if dropped[number] == kept[number]]
        joined = min(committed_quorums(cluster, 0, start=1))
        own = {row["step"] for row in cluster.step_rows(0)}
        assert own == {*range(1, min(both)), *range(joined, steps + 1)}
        file = tmp_path / "run" / "replica-0" / "metrics.jsonl"
        goodput = [row for row in read_json_lines(file) if row.get("event") == "goodput"][-1]
        assert goodput["steps_thrown_away"] >= len(both)


def lines_that(cluster, group: int, key: str) -> list[dict]:
    """Returns what a group has recorded with this key."""
    return [line for line in cluster.records()[f"replica-{group}/rows.rank0.jsonl"] if key in line]


def test_a_newcomer_waits_for_the_group_that_has_the_steps(corpus, tmp_path):
    """It has no checkpoint and a lighthouse that knows nobody, while the survivor is suspended."""
    steps = 50
    changes = {**SMALL, **LOCAL_SGD, "training__steps": steps, "checkpoint__interval": 1000}
    with Cluster(corpus, tmp_path, groups=2, pace=0.04, **changes) as cluster:
        cluster.start(0)
        cluster.watch_over(until=lambda: cluster.step_of(0) >= 20)
        cluster.running[0].signal(signal.SIGSTOP)
        cluster.stop_lighthouse()
        cluster.start_lighthouse_again()
        cluster.start(1)
        waits = "waiting for replica groups: replica group 0 is running and has committed step"
        cluster.watch_over(until=lambda: waits in cluster.log or cluster.step_of(1) > 40)
        cluster.running[0].signal(signal.SIGCONT)
        cluster.watch_over()
        check(cluster, steps=steps, unit=ROUND)
        assert cluster.deaths == []
        assert "healed from another replica group" in cluster.log_of(1)
        # The survivor kept its steps.
        assert sorted(committed_quorums(cluster, 0, start=0)) == list(range(1, steps // ROUND + 1))
        assert [row["step"] for row in cluster.step_rows(0)] == list(range(1, steps + 1))


def test_a_group_that_is_suspended_until_the_end_saves_nothing(corpus, tmp_path):
    """The lighthouse gives it a quorum at once, or at the second attempt."""
    changes = {**SMALL, "training__steps": 30, "checkpoint__interval": 1000, "fault_tolerance__stall_factor": 1000}
    with Cluster(corpus, tmp_path, groups=2, pace=0.05, **changes) as cluster:
        cluster.start_all().watch_over(until=lambda: cluster.step_of(0) >= 8)
        cluster.running[0].signal(signal.SIGSTOP)  # the group that saves
        cluster.watch_over(until=lambda: 1 in cluster.finished)
        cluster.running[0].signal(signal.SIGCONT)
        cluster.watch_over()
        assert cluster.deaths == []
        assert "other replica groups have completed the run; this one ends after step" in cluster.log_of(0)
        assert committed_steps(tmp_path / "run" / "checkpoint") == [30]


def test_two_beginnings_of_a_run_are_not_mixed(corpus, tmp_path):
    """The newcomer cannot see the folder of the survivor, and passes its step: none gives up its steps by itself."""
    changes = {**SMALL, "training__steps": 400, "checkpoint__interval": 1000}
    elsewhere = tmp_path / "elsewhere"
    with Cluster(corpus, tmp_path, groups=2, pace=0.02, **changes) as cluster:

        def steps_elsewhere() -> int:
            file = elsewhere / "run" / "replica-1" / "metrics.jsonl"
            return max(
                [row["step"] for row in read_json_lines(file) if "loss" in row] if file.exists() else [], default=0
            )

        cluster.start(0)
        cluster.watch_over(until=lambda: cluster.step_of(0) >= 5)
        cluster.running[0].signal(signal.SIGSTOP)
        cluster.stop_lighthouse()
        cluster.start_lighthouse_again()
        cluster.start(1, job__dump_folder=elsewhere)
        cluster.watch_over(until=lambda: steps_elsewhere() > cluster.step_of(0) + 10)
        cluster.running[0].signal(signal.SIGCONT)
        kept = "waiting for replica groups: replica group 1 has trained the run anew from step 1 to"
        cluster.watch_over(until=lambda: kept in cluster.log_of(0) and kept in cluster.log_of(1))
        assert "end the one whose steps may be lost and start it again" in cluster.log_of(0)
        cluster.kill(1)
        before = cluster.step_of(0)
        cluster.watch_over(until=lambda: cluster.step_of(0) > before + 5)
        cluster.start(1, job__dump_folder=elsewhere)
        cluster.watch_over(until=lambda: "healed from another replica group" in cluster.log_of(1))
        assert cluster.deaths == []
        assert "healed from" not in cluster.log_of(0)
        committed = sorted(committed_quorums(cluster, 0, start=0))
        assert committed == list(range(1, len(committed) + 1))


def join_a_complete_run(options, folder):
    """Returns whether a replica group, alone in its quorum, begins a step of a run that others have completed."""
    from torchtitan_clone.torchft.group import TorchFTGroup

    with rank_of_a_group():
        context = replica_context({}, folder=folder / "replica-0", is_run_complete=True)
        group = TorchFTGroup(options, run=context)
        begins = group.begin_step()
        group.close()
    return begins


def test_a_quorum_that_forms_at_once_does_not_train_a_complete_run(corpus, tmp_path):
    options = FaultTolerance(enable=True, group_size=1)
    with Cluster(corpus, tmp_path, groups=1) as cluster:
        env = {"TORCHFT_LIGHTHOUSE": cluster.address}
        assert collect(start_ranks(join_a_complete_run, 1, options, tmp_path, env=env)) == [False]


def train_in_two_parts(options, folder):
    """Trains a replica group with one weight for three steps and, once `folder`/go.<its id> exists, for three more."""
    from torchtitan_clone.torchft.group import TorchFTGroup

    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    steps: list[float] = []
    with rank_of_a_group():
        context = replica_context(
            {"weight": weight},
            folder=folder / f"run-{options.replica_id}" / f"replica-{options.replica_id}",
            metadata=lambda: {"steps": list(steps)},
            load_from_peer=lambda metadata: steps.__setitem__(slice(None), metadata["steps"]),
        )
        group = TorchFTGroup(options, run=context)
        while len(steps) < 6:
            if len(steps) == 3 and group.quorum.num_committed == 3:
                (folder / f"reached.{options.replica_id}").touch()
                while not (folder / f"go.{options.replica_id}").exists():
                    time.sleep(0.05)
            assert group.begin_step()
            time.sleep(0.1)
            (total,) = group.sum([float(1 + options.replica_id)])
            if group.commit(healthy=True):
                weight.data += total
                steps.append(weight.item())
                group.complete_step()
        group.close()
    return steps, group.quorum.history


def test_equal_numbers_of_different_steps_are_not_averaged(corpus, tmp_path):
    """The group that started later receives the state of the other one, though both have trained three steps."""
    options = FaultTolerance(enable=True, group_size=2, heartbeat_timeout_ms=1500, process_group_timeout_ms=5000)
    with Cluster(corpus, tmp_path, groups=2, fault_tolerance__heartbeat_timeout_ms=1500) as cluster:
        env = {"TORCHFT_LIGHTHOUSE": cluster.address}

        def start(group: int):
            return start_ranks(train_in_two_parts, 1, replace(options, replica_id=group), tmp_path, env=env)[0]

        def wait_until(is_reached: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 60
            while not is_reached():
                assert time.monotonic() < deadline
                time.sleep(0.02)

        def one_waits() -> bool:
            with urllib.request.urlopen(f"{cluster.address}/status", timeout=10) as page:
                return b"[1/1 participants healthy]" in page.read()

        first = start(0)
        wait_until((tmp_path / "reached.0").exists)
        os.kill(first.process.pid or 0, signal.SIGSTOP)
        second = start(1)
        wait_until((tmp_path / "reached.1").exists)
        os.kill(first.process.pid or 0, signal.SIGCONT)
        (tmp_path / "go.0").touch()
        wait_until(one_waits)  # for the other one, which would get a quorum of its own at once
        (tmp_path / "go.1").touch()
        (older, kept), (newer, taken) = collect([first, second])
    assert older[:3] == [1.0, 2.0, 3.0]
    assert newer == older
    assert [kept.quorum_of(number) for number in (1, 2, 3)] == [taken.quorum_of(number) for number in (1, 2, 3)]
    assert kept.first_difference(taken) is None


def test_a_store_that_is_gone_is_noticed_at_once():
    """torch's client needs 2.5 times its timeout to find that nobody listens: 11.8 s with the default options."""
    from torchtitan_clone.torchft.connection import Gloo

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = Gloo(timeout=timedelta(seconds=10), connect_timeout=timedelta(seconds=2.5))
    with pytest.raises(ConnectionRefusedError):
        group.configure(f"127.0.0.1:{port}/torchft/1/0", "replica_0", 0, 2)


def test_a_death_while_groups_connect_costs_half_a_heartbeat_timeout(corpus, tmp_path):
    """The group dies whose store the others connect through: they try for at most half of heartbeat_timeout_ms."""
    timeouts = {
        "fault_tolerance__heartbeat_timeout_ms": 3000,
        "fault_tolerance__process_group_timeout_ms": 10000,
        "fault_tolerance__join_timeout_ms": 60000,
    }
    faults = [Fault(kind="kill", place="configure", group=0, step=5)]
    changes = {**SMALL, **timeouts, "training__steps": 40, "training__global_batch_size": 6}
    with Cluster(corpus, tmp_path, groups=3, pace=0.08, **changes) as cluster:
        cluster.start(0, faults=faults)
        cluster.start(1)
        cluster.watch_over(until=lambda: cluster.step_of(1) > 5)
        cluster.start(2)
        cluster.watch_over()
        assert [group for _, group, _ in cluster.deaths] == [0]
        check(cluster, steps=40, rows=6)
        reasons = [line["left"] for group in (1, 2) for line in lines_that(cluster, group, "left")]
        assert any("refused" in reason or "1500ms" in reason for reason in reasons)
        assert not [reason for reason in reasons if "3000ms" in reason or "10000ms" in reason]


@pytest.mark.parametrize(
    ("number", "running"),
    [(errno.ENOLCK, []), (errno.ENOSYS, []), (errno.EAGAIN, [(1, 0)]), (errno.EACCES, [(1, 0)])],
)
def test_on_a_file_system_without_locks_no_group_seems_to_run(tmp_path, monkeypatch, number, running):
    logs = [AttemptLog(tmp_path / f"replica-{group}", rank=0, manager=None) for group in range(2)]

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert logs[0].running_groups() == running
    for log in logs:
        log.close()


def test_a_full_disk_under_the_records_ends_no_group(corpus, tmp_path):
    """A limit on the size of files stands for the full disk; only the records reach it."""
    limit = 1 << 24
    for group in range(2):
        (tmp_path / "run" / f"replica-{group}").mkdir(parents=True)
        with (tmp_path / "run" / f"replica-{group}" / "rows.rank0.jsonl").open("wb") as file:
            file.truncate(limit)
    with Cluster(corpus, tmp_path, groups=2, **SMALL, training__steps=6) as cluster:
        cluster.start_all()
        for group in cluster.running.values():
            resource.prlimit(group.ranks[0].process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        cluster.watch_over()
        assert cluster.deaths == []
        for group in range(2):
            assert "metrics cannot be written: [Errno 27] File too large" in cluster.log_of(group)
            assert [row["step"] for row in cluster.step_rows(group)] == [1, 2, 3, 4, 5, 6]


def test_a_history_survives_json_and_forgets_old_quorums():
    history = History(created=1.5, start=20, length=20)
    for quorum in (7, 7, 9):
        history = history.after_commit(quorum)
    assert [history.quorum_of(number) for number in range(20, 25)] == [None, 7, 7, 9, None]
    assert History.parse(Value(history.to_json(), where="history")) == history
    assert history.first_difference(replace(history, length=21)) is None
    assert history.first_difference(replace(history, quorums=((21, 7), (22, 8)))) == 22
    assert history.first_difference(History(created=0, start=0, length=30, quorums=((1, 1), (21, 7), (23, 9)))) is None
    for quorum in range(2 * MAX_CHANGES):
        history = history.after_commit(quorum)
    assert len(history.quorums) == MAX_CHANGES
    assert history.quorum_of(history.start) is None
    assert history.quorum_of(history.start + 1) is not None
    with pytest.raises(DocumentError, match="length = -1"):
        History.parse(Value({**history.to_json(), "length": -1}, where="history"))
