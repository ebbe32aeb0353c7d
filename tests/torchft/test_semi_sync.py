"""LocalSGD and DiLoCo: groups train independent rounds and average their weights, also after kills."""

import json
import re
import signal
from dataclasses import replace
from statistics import mean

import pytest
import torch
from torch import nn

from tests.support.checkpoint_states import rank_of_a_group
from tests.support.cluster import HEARTBEAT_MS, TIMEOUT_MS, Cluster, committed_once
from tests.support.faults import Fault
from tests.support.harness import collect, start_ranks
from tests.support.replicas import replica_context
from tests.support.runs import losses, options, train
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.torchft.outer import init_outer_weights, outer_state

ROWS, STEPS, ROUND = 8, 60, 5
SMALL = {
    "training__global_batch_size": ROWS,
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
    """Returns the losses of one run without replica groups."""
    folder = tmp_path_factory.mktemp("synchronous")
    assert train(options(corpus, folder, **SMALL), log_folder=folder)[0] == 0
    return losses(folder)


def means_of_ten_steps(curve: dict[int, float]) -> list[float]:
    """Returns the mean loss of every ten steps."""
    assert sorted(curve) == list(range(1, STEPS + 1))
    return [mean(curve[step] for step in range(first, first + 10)) for first in range(1, STEPS, 10)]


def test_independent_rounds_converge_and_survive_a_kill(corpus, tmp_path, synchronous):
    """Of DiLoCo; test_streamed_data.py does so with LocalSGD, whose groups are equal after each round."""
    changes = {**SMALL, "fault_tolerance__semi_sync_method": "diloco", **METHODS["diloco"]}
    faults = [Fault(kind="kill", place="commit", step=3, group=1)]
    with Cluster(corpus, tmp_path, groups=2, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over()
        assert [group for _, group, _ in cluster.deaths] == [1]
        assert set(cluster.finished) == {0, 1}
        # The unit of the records is a round.
        assert committed_once(cluster.records(), steps=STEPS // ROUND, rows=ROWS * ROUND) == []
        assert {rank: len(found) for rank, found in cluster.digests("outer/global/").items()} == {0: 1}
        rows = [row for group in range(2) for row in cluster.step_rows(group)]
        steps = {row["step"] for row in rows}
        curve = {step: mean(row["loss"] for row in rows if row["step"] == step) for step in steps}
        independent = means_of_ten_steps(curve)
        assert independent[-1] < synchronous[1] - 1.0
        # Groups that average after every round only start slower, but arrive.
        assert independent[-2:] == pytest.approx(means_of_ten_steps(synchronous)[-2:], rel=0.03)


RESUMED_STEPS = 40


def run_to_completion(cluster, *, end=None, after=0, resumes_after=()) -> dict[int, set[str]]:
    """Trains all steps, interrupted by `end` once all groups have passed step `after`. Returns digests of the state."""
    with cluster:
        if end is not None:
            cluster.start_all().watch_over(until=lambda: min(map(cluster.step_of, range(cluster.groups))) > after)
            end(cluster)
        cluster.start_all().watch_over()
        assert set(cluster.finished) == set(range(cluster.groups))
        resumed = {int(step) for step in re.findall(r"resumed after step (\d+)", cluster.log)}
        assert resumed <= set(resumes_after)
        assert bool(resumed) == (end is not None)
        assert committed_once(cluster.records(), steps=RESUMED_STEPS // ROUND, rows=ROWS * ROUND) == []
        return cluster.digests()


def kill(cluster) -> None:
    """Kills all groups."""
    cluster.kill(*cluster.running)


def stop(cluster) -> None:
    """Asks a group to stop, most likely within a round, which it then rolls back."""
    cluster.running[0].signal(signal.SIGTERM)
    cluster.watch_over()


def test_resume_restores_the_outer_optimizer(corpus, tmp_path):
    """One group resumes bit-identically; of several each resumes with the inner optimizer of the one that saved."""
    changes = {**SMALL, "training__steps": RESUMED_STEPS, "fault_tolerance__semi_sync_method": "diloco"}
    one = {**changes, **METHODS["diloco"]}
    two = {**changes, "fault_tolerance__sync_steps": ROUND}
    uninterrupted = run_to_completion(Cluster(corpus, tmp_path / "uninterrupted", groups=1, **one))
    stopped = Cluster(corpus, tmp_path / "stopped", groups=1, **one)
    assert run_to_completion(stopped, end=stop, after=11, resumes_after=(10, 15, 20)) == uninterrupted
    (records,) = stopped.records().values()
    lines = (tmp_path / "stopped" / "run" / "replica-0" / "metrics.jsonl").read_text().splitlines()
    ledger = [row for row in map(json.loads, lines) if row.get("event") == "goodput"][-1]
    assert ledger["steps_thrown_away"] == sum("rows" in line for line in records) - RESUMED_STEPS
    killed = Cluster(corpus, tmp_path / "killed", groups=2, **two)
    run_to_completion(killed, end=kill, after=22, resumes_after=(20,))
    assert {rank: len(found) for rank, found in killed.digests("model/").items()} == {0: 1}


WEIGHTS = ["layers.0", "layers.1"]
NUM_STEPS = 4 * ROUND


def growth(*, step: int, group: int) -> torch.Tensor:
    """Returns the change of the two weights of a group in a step."""
    return torch.tensor([0.1 * step, 0.2 * (group + 1) ** 2 + 0.01 * step], dtype=torch.float64)


def train_scalar_weights(options, folder):
    """Trains a replica group with one scalar per layer. Returns the number of attempts and the weights by step."""
    from torchtitan_clone.torchft.semi_sync import SemiSyncGroup

    weights = {name: nn.Parameter(torch.zeros(1, dtype=torch.float64)) for name in WEIGHTS}
    outer = outer_state(options, parameters=weights)
    init_outer_weights(outer, parameters=weights)
    curve: list[list[float]] = []
    attempts = 0
    with rank_of_a_group():
        context = replica_context(
            weights,
            folder=folder / str(options.replica_id),
            outer_weights=outer,
            metadata=lambda: {"steps": len(curve)},
            load_from_peer=lambda metadata: curve.__delitem__(slice(metadata["steps"], None)),
        )
        group = SemiSyncGroup(options, run=context)
        while len(curve) < NUM_STEPS:
            assert group.begin_step()
            attempts += 1
            grown = growth(step=len(curve) + 1, group=options.replica_id)
            for weight, more in zip(weights.values(), grown, strict=True):
                weight.data += more
            if attempts == 2 * ROUND - 1 and options.replica_id == 1:
                group.quorum.report_error(RuntimeError("injected"))
            group.commit(healthy=True)
            curve.append([])
            if group.complete_step():
                curve[-1] = [weight.item() for weight in weights.values()]
        group.close()
    return attempts, curve


def expected_weights(options, *, lr: float, momentum: float) -> list[list[list[float]]]:
    """Weights of two groups after each step, with torch's own SGD as the outer optimizer."""
    width = len(WEIGHTS) // options.num_fragments
    shared = [nn.Parameter(torch.zeros(width, dtype=torch.float64)) for _ in range(options.num_fragments)]
    outer = [torch.optim.SGD([fragment], lr=lr, momentum=momentum, nesterov=momentum > 0) for fragment in shared]
    own = [torch.zeros(len(WEIGHTS), dtype=torch.float64) for _ in range(2)]
    curves: list[list[list[float]]] = [[], []]
    for step in range(1, NUM_STEPS + 1):
        turn = (step - 1) // ROUND % options.num_fragments
        place = slice(turn * width, (turn + 1) * width)
        for group, weights in enumerate(own):
            weights += growth(step=step, group=group)
        if (step + options.fragment_sync_delay) % ROUND == 0:
            shared[turn].grad = shared[turn].detach() - (own[0][place] + own[1][place]) / 2
        if step % ROUND == 0:
            outer[turn].step()
            for weights in own:
                weights[place] = shared[turn].detach().lerp(weights[place], options.fragment_update_alpha)
        for curve, weights in zip(curves, own, strict=True):
            curve.append(weights.tolist())
    return curves


@pytest.mark.parametrize(("method", "lr", "momentum"), [("local_sgd", 1.0, 0.0), ("diloco", 0.7, 0.9)])
def test_weights_match_torch_sgd_after_a_rolled_back_round(tmp_path, method, lr, momentum):
    chosen = {key.partition("__")[2]: value for key, value in METHODS[method].items()}
    options = FaultTolerance(
        enable=True,
        group_size=2,
        min_replica_size=2,
        heartbeat_timeout_ms=HEARTBEAT_MS,
        process_group_timeout_ms=TIMEOUT_MS,
        semi_sync_method=method,
        **chosen,
    )
    with Cluster(tmp_path, tmp_path, groups=2, least=2) as cluster:
        env = {"TORCHFT_LIGHTHOUSE": cluster.address}
        ranks = [
            start_ranks(train_scalar_weights, 1, replace(options, replica_id=group), tmp_path, env=env)
            for group in range(2)
        ]
        answers = collect([rank for group in ranks for rank in group])
    assert min(attempts for attempts, _ in answers) >= NUM_STEPS + ROUND
    for (_, curve), expected in zip(answers, expected_weights(options, lr=lr, momentum=momentum), strict=True):
        for step, weights in enumerate(expected, start=1):
            assert curve[step - 1] == pytest.approx(weights, abs=1e-9), f"step {step}"
