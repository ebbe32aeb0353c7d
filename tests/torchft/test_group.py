"""Replica groups in real processes: the losses equal those of one run without them, also after kills, hangs and NaNs.

Tests of group.py and of what it consists of: connection.py and quorum.py.
"""

import json
import math
import signal

import pytest

from tests.data.chats import many_chats, template, write_tokenizer
from tests.data.corpora import write
from tests.support.cluster import Cluster, committed_once
from tests.support.faults import Fault
from tests.support.runs import losses, options, read_json_lines, train
from torchtitan_clone.observe.metrics import METRICS_FILE
from torchtitan_clone.observe.records import TIMELINE_FILE
from torchtitan_clone.tools.report_charts import all_charts
from torchtitan_clone.tools.report_data import read_run, run_folders

ROWS = 12
STEPS = 40
SMALL = {
    "training__global_batch_size": ROWS,
    "training__seq_len": 32,
    "training__steps": STEPS,
    "checkpoint__interval": 20,
    "model__args__n_layers": 1,
}


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """Returns the losses of one uninterrupted run without replica groups."""
    folder = tmp_path_factory.mktemp("single")
    assert train(options(corpus, folder, **SMALL), log_folder=folder)[0] == 0
    return losses(folder)


def check(cluster, expected, *, steps=STEPS) -> None:
    """Asserts that all groups finished with equal bits and the expected losses, and trained on each row once."""
    assert set(cluster.finished) == set(range(cluster.groups)), cluster.log
    assert {rank: len(found) for rank, found in cluster.digests().items()} == dict.fromkeys(range(cluster.ranks), 1)
    assert committed_once(cluster.records(), steps=steps, rows=ROWS) == []
    assert cluster.wrong_rows() == []
    for step, loss in cluster.losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-3), f"step {step}"


def died(cluster) -> list[int]:
    """Groups that died, in order."""
    return [group for _, group, _ in cluster.deaths]


def test_two_groups_recover_from_a_kill(corpus, tmp_path, expected):
    faults = [Fault(kind="kill", place="between", step=5, group=1)]
    with Cluster(corpus, tmp_path, groups=2, pace=0.08, revive_seconds=math.inf, **SMALL) as cluster:
        # The survivor commits steps before the killed group returns.
        cluster.start_all(faults=faults).watch_over(until=lambda: cluster.deaths and cluster.step_of(0) > 8)
        cluster.revive_seconds = 0.0
        cluster.start(1, faults=cluster.faults_left(1))
        cluster.watch_over()
        check(cluster, expected)
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(1, [-signal.SIGKILL])]
        assert "healed from another replica group: step" in cluster.log_of(1)
        assert "neither has a majority" in cluster.log_of(0)
        (run,) = [read_run(folder, name="") for folder in run_folders(tmp_path / "run") if folder.name == "replica-1"]
        titles = {chart.title: chart for chart in all_charts([run], points=100)}
        marks = {trace["name"]: trace for trace in titles["Starts, deaths, saves and recoveries"].traces}
        assert len(marks["start"]["y"]) == 2
        assert marks["end or death"]["y"] == [4]
        assert marks["recovery"]["y"][-1] > 8


def test_two_groups_train_on_chats_as_one_run(tmp_path):
    """The loss is divided by the targets of both groups, which have different numbers of them."""
    folder = write_tokenizer(tmp_path / "t", chat_template=template("chatml", is_marked=False))
    rows = [{"messages": chat} for words in (2, 40) for chat in many_chats(20, words=words)]
    corpus = write(tmp_path / "chats", {"a.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    changes = {
        **SMALL, "training__steps": 8, "training__format": "chat", "training__seq_len": 128,
        "model__hf_assets_path": folder, "data__held_out_fraction": 0, "validation__enable": False,
    }  # fmt: skip
    assert train(options(corpus, tmp_path / "one", **changes), log_folder=tmp_path / "one")[0] == 0
    expected = losses(tmp_path / "one")
    changes["fault_tolerance__min_replica_size"] = 2
    with Cluster(corpus, tmp_path / "two", groups=2, **changes) as cluster:
        cluster.start_all().watch_over()
        assert set(cluster.finished) == {0, 1}, cluster.log
        assert cluster.losses == {step: pytest.approx(expected[step], rel=1e-5) for step in range(1, 9)}


def test_a_healed_group_has_one_weight_for_embedding_and_output(corpus, tmp_path):
    """The state that it receives has tied weights once."""
    tied = {**SMALL, "training__steps": 16, "model__args__tied_embeddings": True}
    assert train(options(corpus, tmp_path / "single", **tied), log_folder=tmp_path / "single")[0] == 0
    with Cluster(corpus, tmp_path / "groups", groups=2, pace=0.08, **tied) as cluster:
        cluster.start_all(faults=[Fault(kind="kill", place="between", step=5, group=1)]).watch_over()
        check(cluster, losses(tmp_path / "single"), steps=16)
        assert "healed from another replica group: step" in cluster.log_of(1)


SPIKY = {
    "training__on_spike": "skip", "training__spike_window": 16, "training__spike_patience": 100,
    "optimizer__lr": 1e-5, "lr_scheduler__points": "[[0, 1.0], [13, 1.0], [14, 1e6], [15, 1.0]]",
}  # fmt: skip
"""A rate times a million in step 14: all steps after it are spikes."""


def skipped_steps(folder):
    """Returns the number of skipped steps by step."""
    return {row["step"]: row["skipped_steps"] for row in read_json_lines(folder / METRICS_FILE) if "loss" in row}


def test_two_groups_skip_the_same_spikes_also_one_that_healed_among_them(corpus, tmp_path):
    """A group that lost the window with its process would train where the other does not, and have other weights."""
    spiky = {**SMALL, **SPIKY}
    assert train(options(corpus, tmp_path / "single", **spiky), log_folder=tmp_path / "single")[0] == 0
    expected = skipped_steps(tmp_path / "single" / "run")
    assert [expected[step] for step in (14, 15, STEPS)] == [0, 1, STEPS - 14]
    with Cluster(corpus, tmp_path / "groups", groups=2, pace=0.08, **spiky) as cluster:
        cluster.start_all(faults=[Fault(kind="kill", place="between", step=18, group=1)]).watch_over()
        check(cluster, losses(tmp_path / "single"))
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(1, [-signal.SIGKILL])]
        assert "healed from another replica group: step" in cluster.log_of(1)
        for group in range(2):
            found = skipped_steps(cluster.folder / "run" / f"replica-{group}")  # without the steps of others
            assert found.items() <= expected.items()


def test_two_groups_go_back_after_spikes_also_where_one_dies_as_they_decide(corpus, tmp_path):
    """The weights are spoilt in step 14; after the spikes 15 to 17 the groups go back to step 12, and on with batch 18.

    Attempts and rows are counted on, the steps 13 to 17 are trained again.
    """
    rewinding = {"training__on_spike": "rewind", "training__spike_window": 16, "training__spike_patience": 3}
    changes = {**SMALL, **rewinding, "checkpoint__interval": 4, "optimizer__lr": 1e-5, "lr_scheduler__warmup_steps": 0}
    skipped = options(corpus, tmp_path / "single", **changes, data__skip_steps="[[13, 17]]")
    assert train(skipped, log_folder=tmp_path / "single")[0] == 0
    faults = [Fault(kind="spoil", place="gradients", step=14, group=group) for group in range(2)]
    faults.append(Fault(kind="kill", place="committed", step=17, group=1))
    with Cluster(corpus, tmp_path / "groups", groups=2, pace=0.08, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over()
        assert set(cluster.finished) == {0, 1}, cluster.log
        assert cluster.digests().keys() == {0}
        assert len(cluster.digests()[0]) == 1
        assert committed_once(cluster.records(), steps=STEPS + 5, rows=ROWS) == []
        assert [row["step"] for row in cluster.step_rows(0)] == list(range(1, STEPS + 1))
        steps = [row["step"] for row in cluster.step_rows(1)]
        assert steps == sorted(set(steps))
        assert cluster.losses == pytest.approx(losses(tmp_path / "single"), rel=1e-3)
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(1, [-signal.SIGKILL])]
        assert "healed from another replica group: step" in cluster.log_of(1)
        progress = json.loads((cluster.folder / "run" / "checkpoint" / f"step-{STEPS}" / "progress.json").read_text())
        assert progress["rewinds"] == [{"step": 12, "from_step": 17, "first_batch": 13, "last_batch": 17}]


@pytest.mark.many_ranks
def test_three_groups_of_two_ranks_survive_kills_at_every_stage(corpus, tmp_path, expected):
    """Among them: the peer's rank 1 dies while it sends its state, after the peer's rank 0 has sent all of it."""
    faults = [
        Fault(kind="kill", place="all_reduce", step=8, group=1, rank=1),
        Fault(kind="kill", place="heal_target", step=8, group=1, rank=0, returning=True),
        Fault(kind="kill", place="committed", step=20, group=0, rank=0),
        Fault(kind="late", place="heal_source", step=21, group=1, rank=1),
        Fault(kind="exception", place="forward", step=32, group=2, rank=1),
    ]
    with Cluster(corpus, tmp_path, groups=3, ranks=2, pace=0.08, comm__straggler_freq=20, **SMALL) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        timeline = json.loads((tmp_path / "run" / "replica-0" / TIMELINE_FILE).read_text())
        assert "replica groups all_reduce" in {name for name, _, _ in timeline["spans"][0]}
        assert died(cluster)[:3] == [1, 1, 0]
        # The rank that did not raise ends because the other did.
        assert any(group == 2 and codes[1] == 1 for _, group, codes in cluster.deaths)
        assert len(cluster.deaths) == cluster.log.count("fault: ")


@pytest.mark.many_ranks
def test_a_group_survives_the_death_of_the_peer_that_sends_its_state(corpus, tmp_path, expected):
    """The peer's rank 0 dies; the rank that gets its state from rank 1 cannot compare the groups either."""
    faults = [
        Fault(kind="kill", place="all_reduce", step=8, group=1, rank=1),
        Fault(kind="kill", place="heal_source", step=8, group=2, rank=0),
    ]
    with Cluster(corpus, tmp_path, groups=3, ranks=2, pace=0.08, **SMALL) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        assert died(cluster) == [1, 2]


def test_nan_exception_and_hang_are_repeated_or_terminated(corpus, tmp_path, expected):
    faults = [
        Fault(kind="nan", place="gradients", step=5, group=1),
        Fault(kind="exception", place="forward", step=12, group=0),
        Fault(kind="hang", place="forward", step=25, group=2),
    ]
    changes = {**SMALL, "fault_tolerance__stall_factor": 5}
    with Cluster(corpus, tmp_path, groups=3, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over()
        check(cluster, expected)
        assert [(group, codes) for _, group, codes in cluster.deaths] == [(0, [1]), (2, [1])]
        for group in range(3):
            assert "step 5: loss" in cluster.log_of(group)
        assert "the step is repeated: loss or gradient is not finite" in cluster.log
        assert "RuntimeError: injected" in cluster.log_of(0)
        assert "Timeout (0:00:" not in cluster.log_of(0)  # it exits at once
        assert "Timeout (0:00:" in cluster.log_of(2)  # faulthandler's, with the stacks below
        assert "in strike" in cluster.log_of(2)


def test_all_groups_resume_from_a_checkpoint(corpus, tmp_path, expected):
    """Group 1 resumes first and trains steps again that the others had committed: these must roll them back.

    Before that it is killed in an all-reduce, and again while the others connect to it.
    """
    last = {"kind": "kill", "group": 1, "step": 8}
    faults = [Fault(place="all_reduce", **last), Fault(place="configure", returning=True, **last)]
    timeouts = {"fault_tolerance__process_group_timeout_ms": 5000, "fault_tolerance__join_timeout_ms": 6000}
    with Cluster(corpus, tmp_path, groups=3, pace=0.08, **SMALL, **timeouts) as cluster:
        cluster.start_all(faults=faults).watch_over(until=lambda: min(map(cluster.step_of, range(3))) > 22)
        assert died(cluster) == [1, 1]
        # The survivors noticed both deaths by themselves, not by the timeout of a collective.
        lines = [line for group in (0, 2) for line in cluster.records()[f"replica-{group}/rows.rank0.jsonl"]]
        failures = [str(line.get("error") or line.get("left")) for line in lines if {"error", "left"} & line.keys()]
        assert failures
        assert not [failure for failure in failures if "5000ms" in failure]
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
        assert "is complete: step 40" in cluster.log_of(1)


def test_groups_below_the_minimum_wait_for_peers_and_the_lighthouse(corpus, tmp_path, expected):
    """The lighthouse is restarted with a smaller minimum: then the group itself must notice that there are too few."""
    changes = {**SMALL, "fault_tolerance__min_replica_size": 2, "comm__train_timeout_seconds": 4}
    faults = [
        Fault(kind="kill", place="commit", step=8, group=1),
        Fault(kind="kill", place="between", step=25, group=1),
    ]
    with Cluster(corpus, tmp_path, groups=2, revive_seconds=2.5, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over(until=lambda: cluster.step_of(0) > 12)
        assert "waiting for replica groups" in cluster.log_of(0)
        cluster.least = 1
        cluster.restart_lighthouse(seconds=5)
        cluster.watch_over()
        check(cluster, expected)
        assert died(cluster) == [1, 1]
        assert "1 in the quorum, but fault_tolerance.min_replica_size = 2; the lighthouse was started" in cluster.log
        attempts = [line for line in cluster.records()["replica-0/rows.rank0.jsonl"] if "rows" in line]
        assert {line["num_replicas"] for line in attempts} == {2}
        assert len(attempts) <= STEPS + 4  # no samples are used up while it waits
        assert "no progress for" not in cluster.log  # waiting is not reported as a hang
