"""Balancing of experts against plain PyTorch: biases to the last bit, auxiliary losses and statistics on every mesh.

Only tokens that are trained count: not those of validations, recomputed forwards, warm-ups and skipped steps. Tests of
engine.py.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from tests.marks import needs_door, needs_split_backward
from tests.support.cluster import Cluster
from tests.support.faults import Fault, digest
from tests.support.harness import run_ranks
from tests.support.plain_data import context_of
from tests.support.plain_loop import PlainLoop
from tests.support.runs import options, rows
from tests.support.trainers import full_copies, open_trainer
from torchtitan_clone.models.moe import Router
from torchtitan_clone.observe.records import LOADS_FILE

STEPS, SKIPPED, RATE = 20, 3, 0.002
ONE_TOKEN = 8 / (8 * 64 * 2)
"""What one of 8 x 64 tokens changes in the loads of experts over their mean: rounding routes it where scores tie."""
TERMS = {"batch_balance": 0.02, "sequence_balance": 0.05, "router_z": 0.01}
MOE = {
    "model__name": "qwen3_moe", "model__args__head_dim": 32, "model__args__hidden_dim": 64,
    "model__args__multiple_of": None, "model__args__moe__num_experts": 8, "model__args__moe__top_k": 2,
    "model__args__moe__hidden_dim": 64, "model__args__moe__expert_bias": True,
    "model__args__moe__bias_update_rate": RATE, "training__steps": STEPS, "checkpoint__enable": False,
    "optimizer__lr": 1e-3, "lr_scheduler__total_steps": STEPS,
    **{f"model__args__moe__{name}": coefficient for name, coefficient in TERMS.items()},
}  # fmt: skip
EXPERT = "parallelism__expert_parallel_degree"
SHARD = "parallelism__data_parallel_shard_degree"
TENSOR = {"parallelism__tensor_parallel_degree": 2}
CONTEXT = {"parallelism__context_parallel_degree": 2}
ZERO_BUBBLE = {
    "parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble",
    "parallelism__pipeline_parallel_first_stage_less_layers": 0,
    "parallelism__pipeline_parallel_last_stage_less_layers": 0, "model__args__n_layers": 4,
    "training__local_batch_size": 8, "parallelism__pipeline_parallel_microbatch_size": 2,
}  # fmt: skip
PIPELINE = {
    "parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 8,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}  # fmt: skip
FULL = {
    "activation_checkpoint__mode": "full", "validation__enable": True, "validation__freq": 2, "validation__steps": 2
}  # fmt: skip
SHORT = {"training__steps": 4}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
PADDED = {"data__packing": "best_fit"}
CASES = {
    "padding, micro-batches of 3": (1, {**PADDED, "training__global_batch_size": 9, "training__local_batch_size": 3}),
    "padding, tensor x context": (4, {**PADDED, SHARD: 1, **TENSOR, **CONTEXT, **SHORT}),
    "padding, pipeline": (2, {**PADDED, SHARD: 1, **PIPELINE, **SHORT}),
    "padding, experts over 2": (2, {**PADDED, SHARD: 2, EXPERT: 2, "activation_checkpoint__mode": "full", **SHORT}),
    "micro-batches of 2, compiled, recomputed": (1, {"training__local_batch_size": 2, **COMPILED, **FULL, **SHORT}),
    "context, recomputed": (2, {SHARD: 1, **CONTEXT, **FULL, **SHORT}),
    "tensor, experts over 2": (2, {SHARD: 1, EXPERT: 2, **TENSOR, **SHORT}),
    "pipeline, zero bubble": (2, {SHARD: 1, **ZERO_BUBBLE, **SHORT}),
    "pipeline, dual, zero bubble": (
        2, {SHARD: 1, **ZERO_BUBBLE, **SHORT, "parallelism__pipeline_parallel_schedule": "DualPipeV"},
    ),
    "pipeline, interleaved": (
        2, {SHARD: 1, **PIPELINE, **SHORT, "model__args__n_layers": 4,
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
}  # fmt: skip


class PlainTraining(PlainLoop):
    """Plain PyTorch with auxiliary losses from their definitions, and with biases that follow the load."""

    def __init__(self, argv):
        super().__init__(argv)
        self.routers = {name: module for name, module in self.model.named_modules() if isinstance(module, Router)}
        self.counts = {name: torch.ones(8) for name in self.routers}
        self.kept = []
        self.terms = {}
        for name, router in self.routers.items():
            router.register_forward_hook(
                lambda router, args, out, name=name: self.observe(name, router, args[0], out[1])
            )

    def observe(self, name, router, x_BTD, experts_BTK):
        """Computes the auxiliary terms of a layer, token by token and row by row, of the tokens that count alone."""
        logits_BTE = F.linear(x_BTD, router.weight)
        probs_BTE = logits_BTE.softmax(-1)
        load_E = 8 * self.counts[name] / self.counts[name].sum()
        rows = [tensors for *tensors, kept in zip(probs_BTE, experts_BTK, logits_BTE, self.kept, strict=True) if kept]
        kept = [[x[self.kept[row]] for x in tensors] for row, tensors in enumerate(rows)]
        found = {
            "batch_balance": sum((probs_TE @ load_E).sum() for probs_TE, _, _ in kept),
            "sequence_balance": sum(
                8 * torch.bincount(experts_TK.flatten(), minlength=8) / experts_TK.numel() @ probs_TE.sum(0)
                for probs_TE, experts_TK, _ in kept
            ),
            "router_z": sum(logits_TE.exp().sum(-1).log().square().sum() for _, _, logits_TE in kept),
        }  # fmt: skip
        self.terms = {term: self.terms.get(term, 0.0) + value for term, value in found.items()}
        self.counts[name] = torch.bincount(torch.cat([x.flatten() for _, x, _ in kept]), minlength=8).float()

    def train_step(self, step):
        """Trains a step, or skips it; its columns in metrics.jsonl."""
        batch = next(self._data)
        is_context_BT = self.balancing.context_BT = context_of(batch.targets_BT >= 0, batch.documents_BT)
        self.kept = [is_context_T.nonzero().flatten().tolist() for is_context_T in is_context_BT]
        assert sum(map(len, self.kept)) < 0.995 * batch.tokens_BT.numel()
        before = dict(self.counts)
        self.terms = {}
        for group in self.optimizer.param_groups:
            group["lr"] = self._peak_lr * self._lr_factor(step)
        logits = self.model(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
        terms = {name: value / batch.num_targets for name, value in self.terms.items()}
        self.optimizer.zero_grad()
        (loss + sum(TERMS[name] * value for name, value in terms.items())).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        loads = torch.stack(list(self.counts.values())).double()
        if step == SKIPPED:
            self.counts = before
            return None
        self.optimizer.step()
        for name, router in self.routers.items():
            change_E = RATE * torch.sign(self.counts[name].double().mean() - self.counts[name].double())
            router.expert_bias += (change_E - change_E.mean()).float()
        shares = loads / loads.sum(1, keepdim=True)
        return {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            **{f"auxiliary/{name}": value.item() for name, value in terms.items()},
            "router/load_max_over_mean": (loads.amax(1) / loads.mean(1)).max().item(),
            "router/load_entropy": (-(shares * shares.clamp(min=1e-9).log()).sum(1) / math.log(8)).mean().item(),
            "router/dead_experts": (loads == 0).double().mean().item(),
        }


def train_plainly(argv):
    """Returns the columns of each step, and the biases after it."""
    loop = PlainTraining(argv)
    columns, biases = [], []
    for step in range(1, STEPS + 1):
        columns.append(loop.train_step(step))
        biases.append({f"{name}.expert_bias": router.expert_bias.clone() for name, router in loop.routers.items()})
    return columns, biases


def trained_biases(argv, skipped=SKIPPED):
    """Trains as the program does, with a loss that is not finite in one step; the biases of this rank."""
    with open_trainer(argv) as trainer:

        def poison(_module, _args, out_BTD):
            is_skipped = torch.is_grad_enabled() and trainer._state.step + 1 == skipped
            return out_BTD * float("nan") if is_skipped else out_BTD

        for part in trainer.engine.model_parts:
            if part.norm is not None:
                part.norm.register_forward_hook(poison)
        trainer.train()
        return full_copies((name, x) for name, x in trainer.engine.model_tensors().items() if "expert_bias" in name)


@pytest.fixture(scope="module")
def corpus(short_documents):
    """Returns documents of which most rows hold several, so that tokens that no target follows are frequent."""
    return short_documents


@pytest.fixture(scope="module")
def references():
    """Results in plain PyTorch, by number of layers."""
    return {}


def expected_for(corpus, folder, changes, references):
    names = ("model__args__n_layers", "data__packing", "training__global_batch_size")
    chosen = {name: changes[name] for name in names if name in changes}
    key = tuple(chosen.items())
    if key not in references:
        size = chosen.get("training__global_batch_size", 8)
        argv = options(corpus, folder / "plain", **{**MOE, **chosen}, training__local_batch_size=size)
        (references[key],) = run_ranks(train_plainly, 1, argv)
        assert all(bias_E.abs().max() > RATE for bias_E in references[key][1][-1].values())
        assert references[key][0][-1]["router/load_max_over_mean"] > 1.05
    return references[key]


def check(argv, folder, expected, *, world_size):
    """Trains, and compares biases and logged columns with those of plain PyTorch."""
    answers = run_ranks(trained_biases, world_size, argv)
    logged = [row for row in rows(folder) if "loss" in row]
    columns, biases_by_step = expected
    expected_biases = biases_by_step[len(logged) - 1]
    found = {}
    for biases in answers:
        for name, bias_E in biases.items():
            assert torch.equal(bias_E, expected_biases[name]), (name, bias_E, expected_biases[name])
        found |= biases
    assert found.keys() == expected_biases.keys()
    assert [row["step"] for row in logged if row["loss"] is None] == [SKIPPED]
    rerouted = set()
    for row, expected_row in zip(logged, columns, strict=False):
        for name, value in (expected_row or {}).items():
            if name.startswith("router/load") and row[name] != pytest.approx(value, rel=1e-5):
                rerouted.add(row["step"])
                assert row[name] == pytest.approx(value, abs=ONE_TOKEN), (row["step"], name)
            else:
                assert row[name] == pytest.approx(value, rel=1e-4 if name == "grad_norm" else 1e-5), (row["step"], name)
    assert len(rerouted) <= 1
    record = json.loads((folder / "run" / LOADS_FILE).read_text())
    assert record["step"] == logged[-1]["step"]
    assert [f"{name}.expert_bias" for name in record["loads"]] == list(expected_biases)
    ratio = max(max(load) * len(load) / sum(load) for load in record["loads"].values())
    assert ratio == pytest.approx(logged[-1]["router/load_max_over_mean"])


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(*case, id=name, marks=needs_split_backward if "zero" in name else [])
        for name, case in CASES.items()
    ],
)
def test_balancing_is_that_of_plain_pytorch(corpus, tmp_path, references, world_size, changes):
    expected = expected_for(corpus, tmp_path, changes, references)
    argv = options(corpus, tmp_path / "run", **{**MOE, **changes})
    check(argv, tmp_path / "run", expected, world_size=world_size)


@pytest.mark.many_ranks
def test_a_resume_with_experts_over_other_ranks_continues_balancing(corpus, tmp_path, references):
    expected = expected_for(corpus, tmp_path, {}, references)

    def part(world_size, steps):
        mesh = {SHARD: world_size, EXPERT: world_size, "training__local_batch_size": 8 // world_size}
        changes = {**MOE, **mesh, "checkpoint__enable": True, "training__steps": steps}
        return options(corpus, tmp_path / "run", **changes)

    run_ranks(trained_biases, 4, part(4, 7))
    run_ranks(trained_biases, 2, part(2, 13))
    check(part(1, STEPS), tmp_path / "run", expected, world_size=1)


def test_terms_and_biases_with_a_frozen_stage_and_on_another_mesh(corpus, tmp_path):
    """From step 2 the first stage is frozen, and from step 4 two ranks of a pipeline are ranks of data parallelism."""
    frozen, again = "{step = 2, layers = 2}", "step = 4, layers = 3"
    moved = f"{{{again}, pipeline_parallel_degree = 1, local_batch_size = 2}}"
    changes = {**MOE, "model__args__n_layers": 4, "training__steps": 6}
    schedules = {"one": f"[{frozen}, {{{again}}}]", "two": f"[{frozen}, {moved}]"}
    one, two = (
        options(corpus, tmp_path / name, **changes, **mesh, training__freeze_schedule=schedules[name])
        for name, mesh in (("one", {}), ("two", PIPELINE))
    )
    (expected,) = run_ranks(trained_biases, 1, one, None)
    for biases in run_ranks(trained_biases, 2, two, None):
        assert biases.keys() == expected.keys()
        assert all(torch.equal(bias_E, expected[name]) for name, bias_E in biases.items())
    found, wanted = ([row for row in rows(tmp_path / name) if "loss" in row] for name in ("two", "one"))
    assert len(found) == 6
    for row, expected_row in zip(found, wanted, strict=True):
        for name in ("loss", "grad_norm", *(f"auxiliary/{term}" for term in TERMS)):
            assert row[name] == pytest.approx(expected_row[name], rel=1e-4), (row["step"], name)


@needs_door("torchft")
def test_replica_groups_count_the_tokens_of_all_and_of_committed_steps_only(corpus, tmp_path):
    changes = {**MOE, "training__steps": 10, "training__global_batch_size": 12}
    argv = options(corpus, tmp_path / "single", **changes, training__local_batch_size=12)
    (biases,) = run_ranks(trained_biases, 1, argv, None)
    # Two groups of three fill the 6 rows that each of them reads up to two micro-batches of 4.
    with Cluster(corpus, tmp_path / "cluster", groups=3, pace=0.03, **changes) as cluster:
        cluster.start_all(faults=[Fault(kind="kill", place="forward", step=4, group=1)]).watch_over()
        assert "healed from another replica group" in cluster.log
        (digests,) = cluster.digests("model/layers.0.feed_forward.router.expert_bias")[0]
        assert digest(biases["layers.0.feed_forward.router.expert_bias"]) in digests
        found = {row["step"]: row["router/load_entropy"] for row in cluster.step_rows(0)}
    for row in rows(tmp_path / "single"):
        if "loss" in row:
            assert found[row["step"]] == pytest.approx(row["router/load_entropy"], rel=1e-6), row["step"]
