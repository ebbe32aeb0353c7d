"""Which group a parameter belongs to, the settings it has there, what is refused, and runs with two optimizers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import runs
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema_training import Optimizer, OptimizerGroup
from torchtitan_clone.optim import OPTIMIZERS, OptimizerKind, find_optimizer_errors
from torchtitan_clone.optim.groups import resolve_groups

SHAPES = {"tok_embeddings.weight": (64, 8)}
SHAPES |= {
    f"layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {"attention.wq.weight": (8, 8), "attention_norm.weight": (8,), "experts.w1": (4, 8, 8)}.items()
}
SHAPES |= {"norm.weight": (8,), "output.weight": (64, 8)}
PARAMETERS = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in SHAPES.items()}
VECTORS = [name for name, shape in SHAPES.items() if len(shape) == 1]


def options(*groups, **changes):
    """Returns the [optimizer] table with these groups, each a dict."""
    return Optimizer(groups=[OptimizerGroup(**group) for group in groups], **changes)


def resolved(*groups, **changes):
    """Settings of every parameter, by name."""
    found = resolve_groups(options(*groups, **changes), parameters=PARAMETERS)
    assert all(group.parameters for group in found)
    assert sorted(name for group in found for name in group.parameters) == sorted(PARAMETERS)
    return {name: group.settings for group in found for name in group.parameters}


def test_without_groups_matrices_come_first_and_vectors_are_not_decayed():
    matrices, vectors = resolve_groups(options(weight_decay=0.2), parameters=PARAMETERS)
    assert [*vectors.parameters] == VECTORS
    assert [*matrices.parameters] == [name for name in PARAMETERS if name not in VECTORS]
    assert (matrices.settings.weight_decay, vectors.settings.weight_decay) == (0.2, 0.0)
    (everything,) = resolve_groups(options(weight_decay=0.2, decay_all_parameters=True), parameters=PARAMETERS)
    assert [*everything.parameters] == [*PARAMETERS]
    assert everything.settings.weight_decay == 0.2


def test_the_first_match_wins():
    one, every = {"pattern": "layers.1.*", "lr": 0.1}, {"pattern": "layers.*", "lr": 0.2}
    rates = {name: settings.lr for name, settings in resolved(one, every, lr=0.3).items()}
    assert rates == {
        name: 0.1 if name.startswith("layers.1.") else 0.2 if name.startswith("layers.") else 0.3 for name in PARAMETERS
    }
    assert resolved(every, one, lr=0.3)["layers.1.experts.w1"].lr == 0.2


def test_patterns_match_full_names_and_their_case():
    group = {"pattern": "*.W1", "lr": 0.1}, {"pattern": "weight", "lr": 0.1}, {"pattern": "layers.[02].*.w?", "lr": 0.5}
    rates = {name for name, settings in resolved(*group).items() if settings.lr == 0.5}
    assert rates == {"layers.0.experts.w1", "layers.2.experts.w1"}
    assert 0.1 not in {settings.lr for settings in resolved(*group).values()}


@pytest.mark.parametrize(
    ("key", "value"), {"name": "Adam", "lr": 0.5, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.5, "eps": 0.5}.items()
)
def test_a_group_sets_one_setting_and_has_the_others_of_the_table(key, value):
    plain, changed = resolved(weight_decay=0.2), resolved({"pattern": "output.*", key: value}, weight_decay=0.2)
    different = {
        (name, field)
        for name in PARAMETERS
        for field in vars(plain[name])
        if getattr(plain[name], field) != getattr(changed[name], field)
    }
    assert different == {("output.weight", key)}
    assert getattr(changed["output.weight"], key) == value


def test_a_groups_own_weight_decay_applies_to_its_vectors():
    settings = resolved({"pattern": "layers.0.*", "weight_decay": 0.4}, {"pattern": "layers.1.*", "lr": 0.5})
    assert settings["layers.0.attention_norm.weight"].weight_decay == 0.4
    assert settings["layers.0.attention.wq.weight"].weight_decay == 0.4
    assert settings["layers.1.attention_norm.weight"].weight_decay == 0.0
    assert settings["layers.1.attention.wq.weight"].weight_decay == Optimizer().weight_decay
    assert settings["layers.2.attention_norm.weight"].weight_decay == 0.0
    settings = resolved({"pattern": "layers.*", "weight_decay": 0.0}, decay_all_parameters=True)
    assert settings["layers.0.attention.wq.weight"].weight_decay == 0.0
    assert settings["norm.weight"].weight_decay == Optimizer().weight_decay


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            options({"pattern": "layers.*.attention.wk.weight"}),
            [
                'optimizer.groups, pattern "layers.*.attention.wk.weight": matches no parameter of the model; did you '
                "mean layers.*.attention.wq.weight?"
            ],
        ),
        (
            options({"pattern": "*", "lr": 0.1}, {"pattern": "zzz"}),
            [
                'optimizer.groups, pattern "zzz": matches no parameter of the model; known: tok_embeddings.weight, '
                "layers.*.attention.wq.weight, layers.*.attention_norm.weight, layers.*.experts.w1, norm.weight, "
                "output.weight"
            ],
        ),
        (
            options({"pattern": "*norm*"}, {"pattern": "norm.weight"}),
            [
                'optimizer.groups, pattern "norm.weight": every parameter that it matches belongs to an earlier group, '
                "and the first match wins; list it before that group, or remove it"
            ],
        ),
        (options(name="Lion"), ['optimizer.name = "Lion": no such optimizer; known: AdamW, Adam, Muon']),
        (
            options({"pattern": "*", "name": "adamw"}, {"pattern": "x*"}, name="Lion"),
            [
                'optimizer.name = "Lion": no such optimizer; known: AdamW, Adam, Muon',
                'optimizer.groups, pattern "*": name = "adamw": no such optimizer (did you mean "AdamW"?); '
                "known: AdamW, Adam, Muon",
                'optimizer.groups, pattern "x*": matches no parameter of the model; known: tok_embeddings.weight, '
                "layers.*.attention.wq.weight, layers.*.attention_norm.weight, layers.*.experts.w1, norm.weight, "
                "output.weight",
            ],
        ),
        (options(), []),
        (options({"pattern": "norm.weight"}, {"pattern": "*norm*"}), []),
    ],
)
def test_what_cannot_be_trained_is_refused(changed, expected):
    assert find_optimizer_errors(changed, parameters=PARAMETERS) == expected


@pytest.fixture
def shampoo():
    """Registers an optimizer for matrices only, for the duration of a test."""
    OPTIMIZERS["Shampoo"] = OptimizerKind(
        build=torch.optim.Muon,
        arguments=lambda settings: {"lr": settings.lr, "momentum": settings.beta1},
        init_state=lambda parameter, settings: {"momentum_buffer": torch.zeros_like(parameter)},
        matrices_only=True,
    )
    yield
    del OPTIMIZERS["Shampoo"]


@pytest.mark.usefixtures("shampoo")
def test_an_optimizer_for_matrices_is_refused_for_vectors():
    assert find_optimizer_errors(options(name="Shampoo"), parameters=PARAMETERS) == [
        'optimizer "Shampoo" updates matrices only, and is assigned layers.*.attention_norm.weight, norm.weight; name '
        "another optimizer for them in optimizer.groups"
    ]
    assert find_optimizer_errors(options(name="Shampoo", args={"momentum": 0.9}), parameters=PARAMETERS) == [
        'optimizer.args.momentum: optimizer "Shampoo" has no options of its own; remove it'
    ]
    vectors_elsewhere = options({"pattern": "*norm.weight", "name": "AdamW"}, name="Shampoo")
    assert find_optimizer_errors(vectors_elsewhere, parameters=PARAMETERS) == []


def test_groups_stand_in_the_file_as_tables(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[optimizer]\nlr = 1\n[[optimizer.groups]]\npattern = 'norm*'\nlr = 2\n"
        "[[optimizer.groups]]\npattern = '*.w1'\nname = 'Adam'\nbeta1 = 0.5\n"
    )
    groups = [OptimizerGroup(pattern="norm*", lr=2.0), OptimizerGroup(pattern="*.w1", name="Adam", beta1=0.5)]
    assert load_config([f"--job.config_file={file}"]).optimizer == Optimizer(lr=1.0, groups=groups)


TWO_OPTIMIZERS = (
    "[{pattern='layers.0.*', name='Adam', lr=1e-2, weight_decay=0.5}, {pattern='norm.weight', beta1=0.5}, "
    "{pattern='layers.1.*', lr_points=[[2, 1.0], [6, 0.0]]}]"
)
PIPELINE = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 2}


def test_groups_train_on_a_pipeline_as_on_one_rank_and_resume_exactly(corpus, tmp_path):
    def run(name, world_size, **changes):
        defaults = {"training__steps": 6, "optimizer__groups": TWO_OPTIMIZERS, "lr_scheduler__min_lr_factor": 1.0}
        argv = runs.options(corpus, tmp_path / name, **defaults | changes)
        code, output = runs.train(argv, world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
        return [*runs.losses(tmp_path / name).values()]

    expected = run("one", 1)
    assert run("default", 1, optimizer__groups="[]") != pytest.approx(expected, rel=1e-3)
    uninterrupted = run("pipeline", 2, **PIPELINE)
    assert uninterrupted == pytest.approx(expected, rel=1e-5)
    run("resumed", 2, **PIPELINE, training__steps=3)
    assert run("resumed", 2, **PIPELINE) == uninterrupted
    for row in (row for row in runs.rows(tmp_path / "resumed") if "loss" in row):
        assert row["lr/layers.0.*"] == pytest.approx(row["lr"] / 3e-3 * 1e-2)
        assert row["lr/layers.1.*"] == pytest.approx(row["lr"] * (6 - max(2, row["step"])) / 4)
        assert sum(name.startswith("lr/") for name in row) == 2


def test_stacked_biases_of_experts_are_not_decayed():
    parameters = {"experts.w1": torch.empty(2, 4, 4), "experts.w1_bias": torch.empty(2, 4)}
    groups = resolve_groups(Optimizer(weight_decay=0.1), parameters=parameters)
    assert [(list(group.parameters), group.settings.weight_decay) for group in groups] == [
        (["experts.w1"], 0.1),
        (["experts.w1_bias"], 0.0),
    ]
