"""LocalSGD and DiLoCo: groups train apart and agree at the end of each round, also when one of them dies."""

import functools
import operator
from statistics import mean

import pytest

from tests.fault_tolerance.cluster import Cluster, committed_once
from tests.fault_tolerance.faults import Fault
from tests.runs import losses, options, train
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.outer import split_into_fragments

ROWS, STEPS, ROUND = 8, 60, 5
SMALL = {
    "training__global_batch_size": ROWS,
    "training__local_batch_size": 2,
    "training__steps": STEPS,
    "checkpoint__interval": 20,
}
METHODS = {
    "local_sgd": {"fault_tolerance__sync_steps": ROUND},
    "diloco": {
        "fault_tolerance__sync_steps": 2 * ROUND,
        "fault_tolerance__num_fragments": 2,
        "fault_tolerance__fragment_sync_delay": 1,
        "fault_tolerance__fragment_update_alpha": 0.25,
    },
}


@pytest.fixture(scope="module")
def synchronous(corpus, tmp_path_factory):
    """The losses of one run that does not train apart."""
    folder = tmp_path_factory.mktemp("synchronous")
    assert train(options(corpus, folder, **SMALL), log_folder=folder)[0] == 0
    return losses(folder)


def by_tens(curve: dict[int, float]) -> list[float]:
    """The mean loss of each ten steps."""
    assert sorted(curve) == list(range(1, STEPS + 1))
    return [mean(curve[step] for step in range(first, first + 10)) for first in range(1, STEPS, 10)]


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_train_apart_agree_and_learn(corpus, tmp_path, synchronous, method):
    changes = {**SMALL, "fault_tolerance__semi_sync_method": method, **METHODS[method]}
    faults = [Fault(kind="kill", place="commit", step=3, group=1)]
    with Cluster(corpus, tmp_path, groups=2, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over()
        assert [group for _, group, _ in cluster.deaths] == [1]
        assert set(cluster.finished) == {0, 1}
        # The counted unit is a round.
        assert committed_once(cluster.records(), steps=STEPS // ROUND, rows=ROWS * ROUND) == []
        if method == "local_sgd":  # with fragments and own weights mixed in they end near each other only
            assert {rank: len(found) for rank, found in cluster.digests("model/").items()} == {0: 1}
        assert {rank: len(found) for rank, found in cluster.digests("outer/global/").items()} == {0: 1}
        rows = [row for group in range(2) for row in cluster.step_rows(group)]
        steps = {row["step"] for row in rows}
        apart = by_tens({step: mean(row["loss"] for row in rows if row["step"] == step) for step in steps})
        assert apart[-1] < synchronous[1] - 1.0
        assert apart == pytest.approx(by_tens(synchronous), rel=0.03)


def run_through(cluster, *, until: int | None = None) -> dict[int, set[str]]:
    """To the end, with a death of all groups behind a step; the digests of all state."""
    with cluster:
        if until is not None:
            cluster.start_all().watch_over(until=lambda: min(map(cluster.step_of, range(cluster.groups))) > until)
            cluster.kill(*cluster.running)
        cluster.start_all().watch_over()
        assert set(cluster.finished) == set(range(cluster.groups))
        assert ("resumed after step 20" in cluster.log) == (until is not None)
        assert committed_once(cluster.records(), steps=STEPS // ROUND, rows=ROWS * ROUND) == []
        assert {rank: len(found) for rank, found in cluster.digests("model/").items()} == {0: 1}
        return cluster.digests()


def test_all_die_and_go_on_with_the_outer_optimizer(corpus, tmp_path):
    """Alone to the last bit; of several groups each goes on with the inner optimizer of the one that saved."""
    changes = {**SMALL, "fault_tolerance__semi_sync_method": "diloco", "fault_tolerance__sync_steps": ROUND}
    whole = run_through(Cluster(corpus, tmp_path / "whole", groups=1, **changes))
    assert run_through(Cluster(corpus, tmp_path / "killed", groups=1, **changes), until=27) == whole
    run_through(Cluster(corpus, tmp_path / "two", groups=2, **changes), until=27)


NAMES = ["tok_embeddings.weight", "layers.0.w", "layers.0.v", "layers.1.w", "norm.weight", "output.weight"]


def test_fragments_hold_every_parameter_once():
    halves = split_into_fragments(NAMES, FaultTolerance(num_fragments=2))
    assert halves == [NAMES[:3], NAMES[3:]]
    listed = [["norm", "layers.0"], ["tok_embeddings", "layers.1", "output"]]
    fragments = split_into_fragments(NAMES, FaultTolerance(module_fqns_per_model_fragment=listed))
    assert sorted(functools.reduce(operator.iadd, fragments, [])) == sorted(NAMES)
    assert fragments[0] == ["layers.0.w", "layers.0.v", "norm.weight"]
    with pytest.raises(ConfigError, match="look at norm"):
        split_into_fragments(NAMES, FaultTolerance(module_fqns_per_model_fragment=[listed[0], [*listed[1], "norm"]]))
