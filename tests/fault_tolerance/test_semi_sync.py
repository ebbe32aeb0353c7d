"""LocalSGD and DiLoCo: groups train apart and agree at the end of each round, also when one of them dies."""

import functools
import json
import operator
import re
import signal
from dataclasses import replace
from statistics import mean

import pytest
import torch
from torch import nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.outer import init_outer_weights, outer_state, split_into_fragments
from torchtitan_clone.fault_tolerance.protocol import RecoveryState
from torchtitan_clone.testing.checkpoint_states import rank_of_a_group
from torchtitan_clone.testing.cluster import HEARTBEAT_MS, TIMEOUT_MS, Cluster, committed_once
from torchtitan_clone.testing.faults import Fault
from torchtitan_clone.testing.harness import collect, start_ranks
from torchtitan_clone.testing.runs import losses, options, train

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


def run_through(cluster, *, end=None, after=0, goes_on_after=()) -> dict[int, set[str]]:
    """To the end; `end` interrupts all groups behind step `after`. The digests of all state."""
    with cluster:
        if end is not None:
            cluster.start_all().watch_over(until=lambda: min(map(cluster.step_of, range(cluster.groups))) > after)
            end(cluster)
        cluster.start_all().watch_over()
        assert set(cluster.finished) == set(range(cluster.groups))
        resumed = {int(step) for step in re.findall(r"resumed after step (\d+)", cluster.log)}
        assert resumed <= set(goes_on_after)
        assert bool(resumed) == (end is not None)
        assert committed_once(cluster.records(), steps=STEPS // ROUND, rows=ROWS * ROUND) == []
        return cluster.digests()


def kill(cluster) -> None:
    """Ends all groups at once."""
    cluster.kill(*cluster.running)


def stop(cluster) -> None:
    """Asks a group to end, most likely within a round, which it then takes back."""
    cluster.running[0].signal(signal.SIGTERM)
    cluster.watch_over()


def test_all_end_and_go_on_with_the_outer_optimizer(corpus, tmp_path):
    """Alone to the last bit; of several groups each goes on with the inner optimizer of the one that saved."""
    changes = {**SMALL, "fault_tolerance__semi_sync_method": "diloco"}
    alone, two = {**changes, **METHODS["diloco"]}, {**changes, "fault_tolerance__sync_steps": ROUND}
    whole = run_through(Cluster(corpus, tmp_path / "whole", groups=1, **alone))
    stopped = Cluster(corpus, tmp_path / "stopped", groups=1, **alone)
    assert run_through(stopped, end=stop, after=26, goes_on_after=(25, 30, 35)) == whole
    (records,) = stopped.records().values()
    lines = (tmp_path / "stopped" / "run" / "replica-0" / "metrics.jsonl").read_text().splitlines()
    ledger = [row for row in map(json.loads, lines) if row.get("event") == "goodput"][-1]
    assert ledger["steps_thrown_away"] == sum("rows" in line for line in records) - STEPS
    killed = Cluster(corpus, tmp_path / "killed", groups=2, **two)
    run_through(killed, end=kill, after=27, goes_on_after=(20,))
    assert {rank: len(found) for rank, found in killed.digests("model/").items()} == {0: 1}


NUMBERS = ["layers.0", "layers.1"]
STEPS_OF_NUMBERS = 4 * ROUND


def growth(*, step: int, group: int) -> torch.Tensor:
    """What training adds to the weights of a group in a step."""
    return torch.tensor([0.1 * step, 0.2 * (group + 1) ** 2 + 0.01 * step], dtype=torch.float64)


def group_that_trains_numbers(options, folder):
    """A replica group with a number for each layer; its weights after each step, and how many steps that took."""
    from torchtitan_clone.fault_tolerance.semi_sync import SemiSyncGroup

    weights = {name: nn.Parameter(torch.zeros(1, dtype=torch.float64)) for name in NUMBERS}
    outer = outer_state(options, parameters=weights)
    init_outer_weights(outer, parameters=weights)
    curve, attempts = [], 0
    healing = RecoveryState(
        tensors={**weights, **outer},
        note=lambda: {"steps": len(curve)},
        take_over=lambda note: curve.__delitem__(slice(note["steps"], None)),
        positions=list,
        take_positions=lambda _: None,
    )
    with rank_of_a_group():
        groups = SemiSyncGroup(
            options,
            device=torch.device("cpu"),
            step=0,
            parameters=weights,
            outer=outer,
            healing=lambda: healing,
            sum_over_ranks=lambda values: values,
            is_over=lambda: False,
            wants_to_stop=lambda: False,
            identity="",
            folder=folder / str(options.replica_id),
        )
        while len(curve) < STEPS_OF_NUMBERS:
            assert groups.begin()
            attempts += 1
            grown = growth(step=len(curve) + 1, group=options.replica_id)
            for weight, more in zip(weights.values(), grown, strict=True):
                weight.data += more
            if attempts == 2 * ROUND - 1 and options.replica_id == 1:
                groups._manager.report_error(RuntimeError("injected"))
            groups.commit(healthy=True)
            curve.append([])
            if groups.complete():
                curve[-1] = [weight.item() for weight in weights.values()]
        groups.close()
    return attempts, curve


def expected_numbers(options, *, lr: float, momentum: float) -> list[list[list[float]]]:
    """The weights of two groups after each step, as torch's own optimizer moves what they share."""
    width = len(NUMBERS) // options.num_fragments
    shared = [nn.Parameter(torch.zeros(width, dtype=torch.float64)) for _ in range(options.num_fragments)]
    outer = [torch.optim.SGD([part], lr=lr, momentum=momentum, nesterov=momentum > 0) for part in shared]
    own = [torch.zeros(len(NUMBERS), dtype=torch.float64) for _ in range(2)]
    curves: list[list[list[float]]] = [[], []]
    for step in range(1, STEPS_OF_NUMBERS + 1):
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
def test_every_weight_is_what_the_method_says_also_after_a_lost_round(tmp_path, method, lr, momentum):
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
            start_ranks(group_that_trains_numbers, 1, replace(options, replica_id=group), tmp_path, env=env)
            for group in range(2)
        ]
        answers = collect([rank for group in ranks for rank in group])
    assert min(attempts for attempts, _ in answers) >= STEPS_OF_NUMBERS + ROUND
    for (_, curve), expected in zip(answers, expected_numbers(options, lr=lr, momentum=momentum), strict=True):
        for step, weights in enumerate(expected, start=1):
            assert curve[step - 1] == pytest.approx(weights, abs=1e-9), f"step {step}"


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
