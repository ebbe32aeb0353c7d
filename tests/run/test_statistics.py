"""Statistics of the whole model: those of plain PyTorch on one device, and equal on every mesh.

Tests of run/observing.py too: QK-clip measures the same steps.
"""

import math

import pytest

from tests.support.harness import run_ranks
from tests.support.parity_matrix import EXPERT, EXPERT_FEATURES, MOE, MUON, QK_CLIP, axes_case
from tests.support.plain_loop import PlainLoop
from tests.support.runs import losses, options, rows
from tests.support.trainers import train_all
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.run import preflight
from torchtitan_clone.run.plan import replica_identity

KINDS = ("grad_norm/", "activation_rms/", "update_ratio/", "clipped_share")
COMMON = {**QK_CLIP, "checkpoint__enable": False, "metrics__statistics_freq": 1}


def statistics(folder):
    """Returns the columns of statistics by step, of the steps that have some."""
    logged = {row["step"]: row for row in rows(folder) if "loss" in row}
    found = {step: {key: x for key, x in row.items() if key.startswith(KINDS)} for step, row in logged.items()}
    return {step: columns for step, columns in found.items() if columns}


# ---------------------------------------------------------------------- one device


def plain_statistics(argv):
    """Returns the same of plain PyTorch, of every step."""
    loop = PlainLoop(argv)
    max_norm = load_config(argv).training.max_norm
    muon, adamw = loop.optimizers
    found, updates, outputs, gradients, before, ratios = {}, {}, {}, {}, {}, {}
    for name, block in loop.model.layers.items():
        block.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out.detach().double()}))

    def keep(*_):
        gradients.update({name: p.grad.double() for name, p in loop.parameters.items()})
        before.update({name: p.detach().double() for name, p in loop.parameters.items()})

    def compare(*_):
        for label, optimizer in (("Muon", muon), ("AdamW", adamw)):
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            names = [name for name, p in loop.parameters.items() if id(p) in mine]
            change = [before[name] - loop.parameters[name].detach() for name in names]
            updates[f"update_ratio/{label}"] = norm(change) / norm([before[name] for name in names])

    muon.register_step_pre_hook(keep)
    adamw.register_step_post_hook(compare)
    for step in range(1, loop.steps + 1):
        grad_norm = loop.train_step(step)[1]
        factor = min(1.0, max_norm / (grad_norm + 1e-6))
        parts = dict.fromkeys(".".join(name.split(".")[: 1 + name.startswith("layers")]) for name in gradients)
        of_parts = {part: [x for name, x in gradients.items() if name.startswith(f"{part}.")] for part in parts}
        found[step] = {
            **{f"grad_norm/{part}": norm(of_part) / factor for part, of_part in of_parts.items()},
            **{f"activation_rms/layers.{name}": out.square().mean().sqrt().item() for name, out in outputs.items()},
            **ratios,
            "clipped_share": float(grad_norm > max_norm),
        }
        ratios = dict(updates)
    return found


def norm(tensors):
    return math.sqrt(sum(x.square().sum().item() for x in tensors))


def test_statistics_are_those_of_plain_pytorch_every_n_steps(corpus, tmp_path):
    changes = {**COMMON, **MUON, "training__steps": 6, "training__max_norm": 0.4745}
    argv = [options(corpus, tmp_path / str(freq), **changes | {"metrics__statistics_freq": freq}) for freq in (1, 3)]
    run_ranks(train_all, 1, argv)
    (expected,) = run_ranks(plain_statistics, 1, argv[0])
    every, third = (statistics(tmp_path / name) for name in "13")
    assert every == {step: pytest.approx(columns, rel=1e-5) for step, columns in expected.items()}
    assert third == {step: every[step] | {"clipped_share": pytest.approx(step / 9)} for step in (3, 6)}


# ---------------------------------------------------------------------- meshes

STEPS = 3
GROUPS = {"optimizer__groups": "[{pattern = 'tok_embeddings.weight', lr = 1e-2}]"}
# Rows of feed-forward networks that no mesh here divides.
DENSE = {"model__args__multiple_of": 1, "model__args__ffn_dim_multiplier": 1.01, **GROUPS}
EXPERTS = {**MOE, **GROUPS, "optimizer__qk_clip": "inf"}
MESHES = {
    "replicate, micro-batches": axes_case(("replicate",), training__local_batch_size=1),
    "shard": axes_case(("shard",)),
    "tensor, compiled, recomputed": axes_case(("tensor",), **EXPERT_FEATURES["compiled, full ac"]),
    "pipeline": axes_case(("pipeline",)),
    "context": axes_case(("context",)),
    "experts": axes_case(("shard",), **{EXPERT: 2}),
    "replicate x shard": axes_case(("replicate", "shard")),
}


def of_meshes(corpus, folder, names, *, world_size):
    """Trains on these meshes and returns the statistics of each by step."""
    runs = []
    for name in names:
        model = EXPERTS if name.endswith("experts") else DENSE
        changes = {**MESHES.get(name, (1, {}))[1], **COMMON, **model, "training__steps": STEPS}
        runs.append(options(corpus, folder / name, **changes | {"model__args__n_layers": 2}))
    run_ranks(train_all, world_size, runs)
    return {name: statistics(folder / name) for name in names}


@pytest.fixture(scope="module")
def of_one_rank(corpus, tmp_path_factory):
    """Returns the statistics of the dense model and of that with experts."""
    return of_meshes(corpus, tmp_path_factory.mktemp("one"), ["one", "one, experts"], world_size=1)


@pytest.fixture(scope="module")
def of_two_ranks(corpus, tmp_path_factory):
    names = [name for name, (ranks, _) in MESHES.items() if ranks == 2]
    return of_meshes(corpus, tmp_path_factory.mktemp("two"), names, world_size=2)


def assert_equal(found, expected):
    assert found == {step: pytest.approx(columns, rel=1e-5) for step, columns in expected.items()}
    assert expected[STEPS].keys() > {"update_ratio/AdamW", "update_ratio/AdamW/tok_embeddings.weight"}
    assert min(x for name, x in expected[STEPS].items() if name != "clipped_share") > 0


@pytest.mark.parametrize("mesh", [name for name, (ranks, _) in MESHES.items() if ranks == 2])
def test_statistics_are_equal_on_every_axis(of_one_rank, of_two_ranks, mesh):
    assert_equal(of_two_ranks[mesh], of_one_rank["one, experts" if mesh == "experts" else "one"])


@pytest.mark.many_ranks
def test_statistics_are_equal_on_replicas_of_shards(corpus, tmp_path, of_one_rank):
    name = "replicate x shard"
    assert_equal(of_meshes(corpus, tmp_path, [name], world_size=4)[name], of_one_rank["one"])


def test_statistics_leave_training_as_it_is(corpus, tmp_path):
    """Also in a run that saves between an update and the row that has it, and resumes."""
    changes = {"training__steps": 4, "lr_scheduler__total_steps": 4, "validation__enable": True, "validation__freq": 2}
    plain = options(corpus, tmp_path / "plain", **changes)
    first, rest = (
        options(corpus, tmp_path / "measured", **changes | {"training__steps": last, "metrics__statistics_freq": 2})
        for last in (3, 4)
    )
    run_ranks(train_all, 1, [plain, first, rest])
    assert losses(tmp_path / "measured") == losses(tmp_path / "plain")
    found = statistics(tmp_path / "measured")
    assert statistics(tmp_path / "plain") == {}
    assert [*found] == [2, 4]
    assert found[4].keys() == found[2].keys() - {"update_ratio/AdamW"}


def test_replica_groups_must_measure_the_same_steps(corpus, tmp_path):
    """They sum the same numbers."""
    argv = (options(corpus, tmp_path, metrics__statistics_freq=freq) for freq in (0, 1))
    plans = [preflight.resolve(load_config(each), world_size=1, device_type="cpu") for each in argv]
    assert len({replica_identity(plan) for plan in plans}) == 2


def test_statistics_without_a_row_are_refused(corpus, tmp_path):
    argv = options(corpus, tmp_path, metrics__log_freq=10, metrics__statistics_freq=25)
    with pytest.raises(ConfigError, match=r"metrics\.statistics_freq = 25: not a multiple of .* set it to 20 or 30"):
        preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
