"""The largest attention logits of a step on every mesh, and weights that are clipped by them.

Tests of parallel/max_logits.py too.
"""

import math
from itertools import pairwise

import pytest
import torch

from tests.support.faults import ReplicaGroupWrapper
from tests.support.harness import run_ranks
from tests.support.parity_matrix import (
    COMPILED,
    EXPERT,
    FEATURES,
    GPT_OSS,
    LATENT,
    METHODS,
    QK_CLIP,
    QWEN3_5,
    axes_case,
)
from tests.support.plain_loop import PlainLoop
from tests.support.runs import make_short_documents, options, rows
from tests.support.trainers import full_copies, open_trainer, open_trainers
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.run import preflight

MODELS = {"grouped": {}, "windows": GPT_OSS, "latent": LATENT, "linear layers": QWEN3_5}
MESHES = {
    "grouped, replicate": ("replicate", {}),
    "grouped, shard, micro-batches": ("shard", {"training__local_batch_size": 1}),
    "grouped, shard, recomputed": ("shard", FEATURES["full ac"]),
    "grouped, tensor, compiled": ("tensor", COMPILED),
    "latent, tensor": ("tensor", {}),
    "latent, pipeline": ("pipeline", {}),
    "windows, experts": ("shard", {EXPERT: 2}),
    "linear layers, shard": ("shard", {}),
    **{
        f"{model}, context, {method}": ("context", {"parallelism__context_parallel_rotate_method": method})
        for method in METHODS
        for model in ("grouped", "windows", "linear layers")
    },
}


def model_of(name):
    return MODELS[name.partition(",")[0]] | ({"model__args__n_layers": 4} if "pipeline" in name else {})


def dense_logits(runs):
    """Returns the largest logits [L, N] of step 1 of each run, from all scores of one device."""
    found = []
    for argv in runs:
        loop = PlainLoop(argv)
        loop.train_step(1)
        by_layer = {int(name.split(".")[1]): logits for name, logits in loop.qk_clip.max_logits.items()}
        found.append(torch.stack([by_layer[layer] for layer in sorted(by_layer)]))
    return found


def measured_logits(runs):
    """Returns the same from the trainer of each run, on this rank; layers of linear attention have none."""
    found = []
    for trainer in open_trainers(runs):
        trainer.train_step(1)
        max_LN = trainer.engine.observers[0].logits.max_LN
        found.append(max_LN[max_LN.isfinite().any(1)])
    return found


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    """Returns by mesh the logits of one device, and those of both ranks."""
    folder = tmp_path_factory.mktemp("logits")
    corpus = make_short_documents(folder / "data" / "corpus")
    common = {"optimizer__qk_clip": "inf", "checkpoint__enable": False}
    plain = {str(model_of(name)): options(corpus, folder / "one", **common, **model_of(name)) for name in MESHES}
    dense = dict(zip(plain, run_ranks(dense_logits, 1, [*plain.values()])[0], strict=True))
    runs = []
    for name, (axis, features) in MESHES.items():
        mesh = axes_case((axis,), **features)[1]
        runs.append(options(corpus, folder / name, **{**mesh, **common, **model_of(name)}))
    of_ranks = zip(*run_ranks(measured_logits, 2, runs), strict=True)
    return {name: (dense[str(model_of(name))], found) for name, found in zip(MESHES, of_ranks, strict=True)}


@pytest.mark.parametrize("mesh", MESHES)
def test_largest_logits_are_those_of_all_scores_on_every_mesh(logits, mesh):
    dense, of_ranks = logits[mesh]
    assert dense.unique().numel() == dense.numel()
    for found in of_ranks:
        torch.testing.assert_close(found.double(), dense, rtol=1e-6, atol=0)


def logits_after_steps(argv, scale):
    """Returns the largest logits of one batch in three steps on it that change no weight but by clipping."""
    with open_trainer(argv) as trainer:
        engine = trainer.engine
        for name, weight in engine.parameters.items():
            if name.endswith("wq.weight"):
                weight.data *= scale
        batch = trainer._state.loader.next_batch(replica_index=0, num_replicas=1)
        found = []
        for step in (1, 2, 3):
            engine.begin_step(step)
            output = engine.forward_backward([batch], num_targets=batch.num_targets)
            grad_norm, *sums = engine.read(engine.gradient_norm(), output)
            totals = engine.totals(sums)
            found.append((engine.observers[0].logits.max_LN.clone(), engine.observers[0].columns()))
            engine.optimizer_step(totals, grad_norm=grad_norm)
        return found


def test_planted_logits_are_at_the_threshold_after_one_step_for_each_layer(corpus, tmp_path):
    changes = {"optimizer__qk_clip": 330.0, "optimizer__lr": 1e-20, "optimizer__weight_decay": 0.0}
    argv = options(corpus, tmp_path, **changes, lr_scheduler__warmup_steps=0)
    (found,) = run_ranks(logits_after_steps, 1, argv, 3000.0)
    (before, columns), (after, _), (again, last) = found
    is_above = before > 330.0
    assert 0 < is_above.sum() < is_above.numel(), before
    assert columns["attention/max_logit"] == before.max()
    assert columns["attention/clipped_heads"] == pytest.approx(is_above.double().mean())
    # What the first layer computes changes once, what the second layer computes then once more.
    torch.testing.assert_close(after[0], before[0].clamp_max(330.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(again[0], after[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(again[1], after[1].clamp_max(330.0), rtol=1e-5, atol=0)
    assert last["attention/max_logit"] <= 330.0 * (1 + 1e-5)


NOT_FINITE, SPIKE, STEPS = 3, 6, 7


class SpoilsGradients(ReplicaGroupWrapper):
    """Makes the gradients of one step infinite, those of a later one a million times as large, and keeps weights."""

    def __init__(self, group):
        super().__init__(group)
        self.weights = []

    def sum_gradients(self, parameters):
        parameters = list(parameters)
        self.weights.append([parameter.detach().clone() for parameter in parameters])
        factor = {NOT_FINITE: math.inf, SPIKE: 1e6}.get(len(self.weights), 1.0)
        for parameter in parameters:
            parameter.grad *= factor


def weights_of_spoilt_steps(argv):
    """Returns the weights before each step and after the last."""
    groups = []

    def wrap(group):
        groups.append(SpoilsGradients(group))
        return groups[-1]

    with open_trainer(argv, wrap_replica_group=wrap) as trainer:
        trainer.train()
        return [*groups[0].weights, [*full_copies(trainer.engine.parameters.items()).values()]]


def test_skipped_steps_clip_nothing_and_have_no_update(corpus, tmp_path):
    """Whether they are skipped for a value that is not finite or for a spike."""
    changes = {**QK_CLIP, "training__steps": STEPS, "checkpoint__enable": False, "metrics__statistics_freq": 1}
    changes |= {"training__on_spike": "skip", "training__spike_window": 4}
    (weights,) = run_ranks(weights_of_spoilt_steps, 1, options(corpus, tmp_path, **changes))
    same = [all(torch.equal(a, b) for a, b in zip(*each, strict=True)) for each in pairwise(weights)]
    assert [step for step, is_same in enumerate(same, 1) if is_same] == [NOT_FINITE, SPIKE]
    logged = [row for row in rows(tmp_path) if "loss" in row]
    assert min(row["attention/clipped_heads"] for row in logged) > 0
    assert [row["step"] for row in logged if "clipped_share" not in row] == [NOT_FINITE, SPIKE]
    assert [row["step"] for row in logged if "update_ratio/AdamW" not in row] == [1, NOT_FINITE + 1, SPIKE + 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__name": "qwen3"}, "optimizer.qk_clip = 100: layers.0.attention normalizes queries and keys"),
        ({"fault_tolerance__enable": True, "fault_tolerance__group_size": 2}, "those of one replica group"),
        ({"optimizer__qk_clip": 0}, "optimizer.qk_clip"),
    ],
)
def test_what_clipping_cannot_do_is_named_before_the_start(corpus, tmp_path, changes, message):
    model = dict.fromkeys(("model__args__multiple_of",)) if "model__name" in changes else {}
    argv = options(corpus, tmp_path, **{"optimizer__qk_clip": 100, **changes, **model})
    with pytest.raises(ConfigError, match=message):
        preflight.resolve(load_config(argv), world_size=1, device_type="cpu")


def test_a_model_with_normalized_queries_can_log_its_logits(corpus, tmp_path):
    argv = options(corpus, tmp_path, model__name="qwen3", model__args__multiple_of=None, optimizer__qk_clip="inf")
    assert preflight.resolve(load_config(argv), world_size=1, device_type="cpu").config.optimizer.qk_clip is not None
