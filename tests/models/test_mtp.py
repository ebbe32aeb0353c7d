"""Tests of mtp.py: multi-token prediction on changing meshes, in validation and in the simulation.

The parity matrix compares every kind of mesh with the equations of the report.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.marks import needs_door
from tests.support.harness import run_ranks
from tests.support.parity_matrix import PREDICTION
from tests.support.plain_loop import PlainLoop
from tests.support.runs import options, rows
from tests.support.trainers import open_trainer
from torchtitan_clone.config import load_config
from torchtitan_clone.planner.simulate import simulate
from torchtitan_clone.planner.step_memory import stage_parameters
from torchtitan_clone.run.preflight import resolve

STEPS, FROZEN_AT, SAVED_AT = 5, 2, 3
COMMON = {
    **PREDICTION, "model__args__n_layers": 4, "lr_scheduler__total_steps": STEPS, "training__max_norm": 1e9,
    "optimizer__lr": 1e-3,
}  # fmt: skip
DEGREE = "parallelism__{}_parallel_degree"


@pytest.fixture(scope="module")
def corpus(short_documents):
    """Returns documents of which most rows hold several."""
    return short_documents


def train(argv):
    with open_trainer(argv) as trainer:
        trainer.train()


def train_plainly(argv):
    """Returns the columns of each step; from one step on the embedding and the first layer are frozen."""
    loop = PlainLoop(argv)
    found = []
    for step in range(1, STEPS + 1):
        if step == FROZEN_AT:
            loop.model.tok_embeddings.requires_grad_(False)
            loop.model.layers["0"].requires_grad_(False)
        loss, norm = loop.train_step(step)
        terms = {f"auxiliary/mtp_loss_{k}": term.item() for k, term in enumerate(loop.mtp_losses, 1)}
        found.append({"loss": loss, "grad_norm": norm, **terms})
    return found


def test_frozen_moved_and_resumed_on_other_meshes(corpus, tmp_path):
    """A pipeline, then the same ranks without it and a frozen layer, then a checkpoint of these on the tensor axis."""
    frozen = f"[{{step = {FROZEN_AT}, layers = 1%s}}]"
    schedule = "training__freeze_schedule"
    (expected,) = run_ranks(train_plainly, 1, options(corpus, tmp_path / "plain", **COMMON, training__steps=STEPS))
    first = {DEGREE.format("pipeline"): 2, schedule: frozen % ", pipeline_parallel_degree = 1"}
    run_ranks(train, 2, options(corpus, tmp_path, **COMMON, **first, training__steps=SAVED_AT))
    second = {DEGREE.format("tensor"): 2, schedule: frozen % ""}
    run_ranks(train, 2, options(corpus, tmp_path, **COMMON, **second, training__steps=STEPS))
    logged = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5]
    for row, expected_row in zip(logged, expected, strict=True):
        assert {name: row[name] for name in expected_row} == pytest.approx(expected_row, rel=1e-4)


def train_and_validate(argv):
    """Returns whether each call of the last layer had gradients, its router's bias, and the validation loss."""
    with open_trainer(argv) as trainer:
        (model,) = trainer.engine.model_parts
        has_gradients = []
        model.layers["5"].register_forward_hook(lambda *_: has_gradients.append(torch.is_grad_enabled()))
        trainer.train()
        total, num_targets = 0.0, 0
        with torch.no_grad():
            for batch in trainer._validator.loader:
                logits = model(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum")
                total, num_targets = total + loss.item(), num_targets + batch.num_targets
        bias_E = trainer.engine.model_tensors()["layers.5.feed_forward.router.expert_bias"].clone()
        return has_gradients, bias_E, total / num_targets


def test_validation_leaves_the_layers_out_and_training_balances_them(corpus, tmp_path):
    changes = {
        "validation__enable": True, "validation__freq": 1, "training__steps": 2, "checkpoint__enable": False,
        "model__args__moe__bias_update_rate": 0.001,
    }  # fmt: skip
    ((has_gradients, bias_E, loss),) = run_ranks(train_and_validate, 1, options(corpus, tmp_path, **COMMON | changes))
    assert has_gradients == [True] * 4  # two steps of two micro-batches
    assert (bias_E != 0).all()
    (*_, last) = (row for row in rows(tmp_path) if "validation_loss" in row)
    assert last["validation_loss"] == pytest.approx(loss, rel=1e-6)


def simulated(argv):
    plan = resolve(load_config(argv), world_size=8, device_type="cpu")
    return plan.parameter_count, plan.stages.modules[-1], stage_parameters(plan), simulate(plan)


@needs_door("planner")
def test_the_simulation_has_the_layers_on_the_last_stage(corpus, tmp_path):
    axes = {
        DEGREE.format("pipeline"): 2, DEGREE.format("tensor"): 2, DEGREE.format("expert"): 2,
        "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
    }  # fmt: skip
    ((count, modules, by_rank, text),) = run_ranks(simulated, 1, options(corpus, tmp_path, **COMMON, **axes))
    assert modules[-2:] == ("layers.4", "layers.5")
    assert sum(by_rank) == count
    assert by_rank[1] > by_rank[0]
    # The weight of the embedding is gathered once. Rank 0 sends, 4 times for 3 pairs of stages, hidden states and the
    # embeddings of two depths: 3 x 64 tokens x 64 dims over 2 ranks, in fp32.
    assert re.search(r"^fsdp +all_gather +tok_embeddings +1 ", text, re.MULTILINE), text
    sent = next(line for line in text.splitlines() if re.match(r"pp +send", line))
    assert float(sent.split()[-1]) == pytest.approx(4 * 3 * 3 * 32 * 64 * 4 / 2**20, abs=0.005)
