"""Averages of weights follow their formula on every mesh, through skipped steps, resumes, freezing and validation."""

import math
from itertools import pairwise

import pytest
import torch

from tests.support.checkpoint_states import read_tensors
from tests.support.faults import ReplicaGroupWrapper
from tests.support.harness import run_ranks
from tests.support.parity_matrix import EXPERT, MOE, axes_case
from tests.support.runs import options, rows, train
from tests.support.trainers import full_copies, open_trainers
from torchtitan_clone.config.schema import EMA
from torchtitan_clone.optim.ema import AveragedWeights, decay_after

STEPS = 4


def test_the_decay_is_constant_or_halves_in_proportion_to_the_updates():
    assert decay_after(7, options=EMA(decay=0.9)) == 0.9
    assert decay_after(7, options=EMA(decay=0.9, freq=3)) == pytest.approx(0.9**3)
    assert decay_after(50, options=EMA(half_life=0.1)) ** 5 == pytest.approx(0.5)
    assert decay_after(50, options=EMA(half_life=0.1, freq=5)) == pytest.approx(0.5)


def test_averages_are_in_fp32_whatever_the_weights_are():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    averaged = AveragedWeights(EMA(decay=0.999), parameters={"w": weight})
    averaged.fill()
    weight.data.fill_(1.0)
    for update in range(1, 11):
        averaged.update(update)
    torch.testing.assert_close(averaged.averages()["w"], torch.full((3,), 1 - 0.999**10))


class WeightKeeper(ReplicaGroupWrapper):
    """Keeps weights and averages after each step, and makes the gradients of one step infinite."""

    def __init__(self, group, *, infinite):
        super().__init__(group)
        self._infinite = infinite
        self.trainer = None
        self.weights = []
        self.averages = []

    def keep(self):
        """Copies the present weights and averages."""
        engine = self.trainer.engine
        self.weights.append(full_copies(engine.parameters.items()))
        self.averages.append(full_copies(engine.ema.averages().items()))

    def sum_gradients(self, parameters):
        if len(self.weights) == self._infinite:
            for parameter in (p for p in parameters if p.grad is not None):
                parameter.grad.mul_(math.inf)

    def complete_step(self):
        self.keep()
        return self._group.complete_step()


def train_and_keep(runs, infinite):
    """Returns the weights and averages of this rank before training and after each step of each run."""
    keepers = []

    def wrap(group):
        keepers.append(WeightKeeper(group, infinite=infinite))
        return keepers[-1]

    for trainer in open_trainers(runs, wrap_replica_group=wrap):
        keepers[-1].trainer = trainer
        keepers[-1].keep()
        trainer.train()
    return [(keeper.weights, keeper.averages) for keeper in keepers]


def merged(states):
    """Returns the tensors of all ranks by name."""
    return {name: tensor for state in states for name, tensor in state.items()}


def averages_of(corpus, folder, cases, *, world_size, infinite=0, **changes):
    """Trains each case; checks its averages by the formula, and returns those of all ranks after each step."""
    common = {"training__steps": STEPS, "ema__enable": True, "ema__decay": 0.9, "training__local_batch_size": 1}
    runs = [
        options(corpus, folder / str(number), **{**common, "checkpoint__enable": False, **case, **changes})
        for number, case in enumerate(cases)
    ]
    answers = run_ranks(train_and_keep, world_size, runs, infinite)
    found = []
    for of_ranks in zip(*answers, strict=True):
        steps = [[merged(rank[kind][step] for rank in of_ranks) for step in range(STEPS + 1)] for kind in range(2)]
        check_formula(*steps, freq=changes.get("ema__freq", 1), skipped=infinite)
        found.append(steps[1])
    return found


def check_formula(weights, averages, *, freq, skipped):
    """Compares averages with the formula in fp64, of the weights after each step."""
    expected = {name: weight.double() for name, weight in weights[0].items()}
    updates = 0
    for step in range(1, STEPS + 1):
        updates += step != skipped
        if step != skipped and updates % freq == 0:
            expected = {n: x * 0.9**freq + weights[step][n].double() * (1 - 0.9**freq) for n, x in expected.items()}
        assert averages[step].keys() == expected.keys() == weights[step].keys()
        for name, average in averages[step].items():
            assert average.dtype == torch.float32
            torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def of_one_rank(corpus, tmp_path_factory):
    """Returns the averages after each step on one rank, of a dense model and of one with experts."""
    return averages_of(corpus, tmp_path_factory.mktemp("one"), [{}, MOE], world_size=1)


def mesh(*axes, **features):
    """Returns the options of a mesh with two ranks on an axis."""
    return {**axes_case(axes)[1], "training__local_batch_size": 1, **features, "model__args__n_layers": 2}


def assert_equal_averages(found, expected):
    """Compares the averages after the last step."""
    assert found[-1].keys() == expected[-1].keys()
    for name, average in found[-1].items():
        assert (average - expected[-1][name]).norm() <= 1e-5 * expected[-1][name].norm(), name


def test_averages_are_equal_on_every_axis(corpus, tmp_path, of_one_rank):
    cases = [mesh(axis) for axis in ("shard", "replicate", "tensor", "pipeline", "context")]
    cases[3] |= {"training__local_batch_size": 4}
    dense, experts = of_one_rank
    found = averages_of(corpus, tmp_path, [*cases, mesh("shard", **MOE, **{EXPERT: 2})], world_size=2)
    for averages in found[:-1]:
        assert_equal_averages(averages, dense)
    assert_equal_averages(found[-1], experts)


@pytest.mark.many_ranks
def test_averages_are_equal_on_uneven_shards_of_three_axes(corpus, tmp_path, of_one_rank):
    case = mesh("shard", "tensor", "pipeline", training__local_batch_size=4)
    (found,) = averages_of(corpus, tmp_path, [case], world_size=8)
    assert_equal_averages(found, of_one_rank[0])


def test_skipped_steps_leave_averages_alone_and_updates_are_counted(corpus, tmp_path):
    """In steps 1, 2 and 4 weights are updated, and averages in every second of these."""
    cases = [{}, {"training__enable_cpu_offload": True, "model__args__tied_embeddings": True}]
    for averages in averages_of(corpus, tmp_path, cases, world_size=1, infinite=3, ema__freq=2):
        same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(averages)]
        assert same == [True, False, True, True]


def test_averages_of_frozen_layers_approach_their_weights_on_a_new_mesh(corpus, tmp_path):
    freeze = "[{step = 3, layers = 1, pipeline_parallel_degree = 1, local_batch_size = 1}]"
    case = mesh("pipeline", training__local_batch_size=4, training__freeze_schedule=freeze)
    (averages,) = averages_of(corpus, tmp_path, [case], world_size=2)
    assert not torch.equal(averages[3]["tok_embeddings.weight"], averages[4]["tok_embeddings.weight"])


SAVED = {"training__steps": STEPS, "checkpoint__interval": 2, "ema__enable": True, "ema__half_life": 0.5}


def test_averages_resume_and_start_at_the_weights_of_a_run_that_had_none(corpus, tmp_path):
    def run(name, world_size=1, **changes):
        argv = options(corpus, tmp_path / name, **{**SAVED, "lr_scheduler__total_steps": STEPS, **changes})
        code, output = train(argv, world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
        return output

    def saved(name, step=STEPS):
        return read_tensors(tmp_path / name / "run" / "checkpoint" / f"step-{step}")

    run("whole")
    run("resumed", training__steps=2)
    run("resumed")
    expected, found = saved("whole"), saved("resumed")
    names = [name for name in expected if name.startswith("ema/")]
    assert len(names) == sum(name.startswith("model/") for name in expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())  # weights too
    run("moved", training__steps=2)
    run("moved", world_size=2)
    found = saved("moved")
    assert all((found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm() for name in names)
    run("late", training__steps=2, ema__enable=False, ema__half_life=None)
    assert "has no averages of the weights: they start at its weights" in run("late", training__steps=3)
    before, after = saved("late", step=2), saved("late", step=3)
    for name in names:
        weights = name.replace("ema/", "model/")
        average = before[weights].lerp(after[weights], 1 - decay_after(3, options=EMA(half_life=0.5)))
        torch.testing.assert_close(after[name], average)
    run("again", ema__enable=True)
    assert "are not loaded, and end here" in run("again", ema__enable=False, ema__half_life=None, training__steps=5)
    assert not any(name.startswith("ema/") for name in saved("again", step=5))


def validate_with_averages(runs):
    """Returns of each run the loss of its averages as weights; checks that the state kept the weights meanwhile."""
    found = []
    for trainer in open_trainers(runs):
        trainer.train()
        engine = trainer.engine
        weights, averages = full_copies(engine.parameters.items()), full_copies(engine.ema.averages().items())
        with engine.ema.in_place_of_weights():
            inside, state = full_copies(engine.parameters.items()), full_copies(trainer.state_tensors().items())
        after = full_copies(engine.parameters.items())
        assert all(torch.equal(inside[name], averages[name]) for name in averages)
        assert all(torch.equal(state[f"model/{name}"], weights[name]) for name in weights)
        assert all(torch.equal(after[name], weights[name]) for name in weights)
        found.append((weights, averages))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_and_export_are_of_the_averages(corpus, tmp_path, world_size):
    """Where FSDP keeps gathered weights, too. Then averages are the weights of a run that only validates."""
    common = {"validation__enable": True, "validation__freq": 2, "ema__enable": True, "checkpoint__enable": False}
    common |= {"training__steps": STEPS, "ema__decay": 0.8, "training__local_batch_size": 1}
    kept = {"parallelism__fsdp_reshard_after_forward": "never"} if world_size > 1 else {}
    export = {"checkpoint__last_save_in_hf": True, "ema__export": True}
    runs = [
        options(corpus, tmp_path / "plain", **common, **kept),
        options(corpus, tmp_path / "averaged", **common, **kept, ema__validate=True, **export),
    ]
    plain, averaged = run_ranks(validate_with_averages, world_size, runs)[0]
    for name, weight in plain[0].items():
        assert torch.equal(weight, averaged[0][name]), name
    losses = {name: logged_validation(tmp_path / name) for name in ("plain", "averaged")}
    assert losses["plain"] != pytest.approx(losses["averaged"], rel=1e-3)
    from_export = {"checkpoint__initial_load_in_hf": True, "optimizer__lr": 1e-12, "ema__enable": False}
    from_export |= {"checkpoint__initial_load_path": tmp_path / "averaged" / "run" / "hf" / f"step-{STEPS}"}
    changes = {**common, **from_export, "training__steps": 2, "ema__decay": 0.999}
    code, output = train(options(corpus, tmp_path / "exported", **changes), log_folder=tmp_path)
    assert code == 0, output
    assert logged_validation(tmp_path / "exported")[-1] == pytest.approx(losses["averaged"][-1], rel=1e-5)


def logged_validation(folder):
    """Returns the losses of a run's validations."""
    return [row["validation_loss"] for row in rows(folder) if "validation_loss" in row]
