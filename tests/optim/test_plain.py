"""Optimizers of torch's interface from a module that is not in the package: on ranks, in checkpoints, in a dry run."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import runs
from tests.test_readme import blocks
from torchtitan_clone.checkpoint.load import verify
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Optimizer, OptimizerGroup
from torchtitan_clone.optim import OPTIMIZERS, build_optimizer, find_optimizer_errors
from torchtitan_clone.optim.plain import register_optimizer
from torchtitan_clone.optim.schedule import Factors

ROOT = Path(__file__).parents[2]
PARTS = """
import json
from pathlib import Path
from dataclasses import replace
import my_lion
from torchtitan_clone.data.sources import DATASETS, Source
from torchtitan_clone.models import MODELS
from torchtitan_clone.optim import SCHEDULES

def squares():
    file = Path(__file__).with_name("squares.jsonl")
    return Source(name="squares", root=file.parent, files=(file,), text_key="body")

llama3 = MODELS["llama3"]
MODELS["mine"] = replace(llama3, name="mine", flavors={"tiny": replace(llama3.flavors["debugmodel"], n_layers=2)})
DATASETS["squares"] = squares
SCHEDULES["square"] = lambda progress: (1 - progress) ** 2
"""


@pytest.fixture
def modules(tmp_path):
    """Returns a folder with the module of the documentation, one with a model, a dataset and a schedule, and text."""
    (lion,) = [block for block in blocks(ROOT / "docs" / "extending.md", "python") if "# my_lion.py" in block]
    (tmp_path / "my_lion.py").write_text(lion)
    (tmp_path / "my_parts.py").write_text(PARTS)
    rows = [f'{{"body": "The square of {number} is {number**2}."}}\n' * 5 for number in range(100)]
    (tmp_path / "squares.jsonl").write_text("".join(rows))
    return tmp_path


def options(folder, **changes):
    """Returns the command line of a run that names all that the modules add."""
    own = {"job__imports": '["my_parts"]', "optimizer__name": "Lion", "optimizer__args__beta2": 0.98,
           "optimizer__lr": 1e-3, "optimizer__groups": "[{pattern = '*norm.weight', name = 'AdamW'}]",
           "lr_scheduler__decay_type": "square", "lr_scheduler__total_steps": 6, "model__name": "mine",
           "model__flavor": "tiny", "training__dataset": "squares", "training__dataset_path": None,
           "data__cache_folder": folder / "cache"}  # fmt: skip
    return [*runs.options(folder / "any", folder, **own | changes)]


def train(folder, *, world_size, **changes):
    """Returns the losses of a run in a folder by step; its processes find modules as this one does."""
    code, output = runs.train(options(folder, **changes), world_size=world_size, log_folder=folder)
    assert code == 0, output
    return runs.losses(folder)


def test_a_module_out_of_the_tree_trains_on_ranks_and_resumes_on_another_mesh(modules, monkeypatch):
    monkeypatch.syspath_prepend(modules)
    expected = train(modules / "one", world_size=1, training__steps=6)
    shard, tensor = ({f"parallelism__{axis}_degree": 2} for axis in ("data_parallel_shard", "tensor_parallel"))
    train(modules / "two", world_size=2, training__steps=3, checkpoint__interval=3, **shard)
    losses = train(modules / "two", world_size=2, training__steps=6, checkpoint__interval=3, **tensor)
    assert losses == pytest.approx(expected, rel=1e-5)
    saved = verify(modules / "two" / "run" / "checkpoint" / "step-6", step=6, digests=True)
    assert "optimizer/layers.0.attention.wq.weight/exp_avg" in saved
    assert "optimizer/norm.weight/exp_avg_sq" in saved


def test_a_dry_run_on_two_ranks_knows_the_module(modules):
    command = [str(ROOT / "run_train.sh"), *options(modules), "--dry-run"]
    cleared = {key: value for key, value in os.environ.items() if key not in ("CONFIG_FILE", "RANK", "WORLD_SIZE")}
    environment = cleared | {"PYTHON": sys.executable, "NO_SETUP": "1", "NGPU": "2"}
    answer = subprocess.run(command, cwd=modules, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert 'imports = ["my_parts"]' in answer.stdout
    assert 'name = "Lion"' in answer.stdout


def optimizer_class(body, **defaults):
    """Returns a class whose step has this body, with `group`, `p` and `state` at hand."""

    class Own(torch.optim.Optimizer):
        def __init__(self, params, *, lr, **others):
            super().__init__(params, {"lr": lr} | others)

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    body(group, p, self.state[p])

    return Own


@pytest.fixture
def registered(monkeypatch):
    """Returns a function that registers an optimizer for the duration of a test, with its settings."""

    def enter(build, **others):
        monkeypatch.setitem(OPTIMIZERS, "Own", None)  # is removed after the test
        register_optimizer("Own", build, **others)
        return Optimizer(name="Own", lr=0.1)

    return enter


def count_steps(group, p, state):
    state["step"] = state.get("step", 0) + 1
    p.sub_(p.grad / (1 - 0.9 ** state["step"]), alpha=group["lr"])


@dataclass(frozen=True, kw_only=True)
class OwnArgs:
    scale: float = 1.0


def test_numbers_of_the_state_are_saved_and_go_on(registered):
    settings = registered(optimizer_class(count_steps))
    weight, twin = (nn.Parameter(torch.ones(3)) for _ in range(2))
    reference = optimizer_class(count_steps)([twin], lr=0.1)
    container = build_optimizer(settings, named_parameters={"w": weight})
    for step in range(4):
        if step == 2:
            state = container.state_dict()
            assert {name: value.item() for name, value in state.items()} == {"w/step": 2}
            container = build_optimizer(settings, named_parameters={"w": weight})
            container.load_state_dict(state)
        weight.grad, twin.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
        container.step()
        reference.step()
    assert torch.equal(weight, twin)


def test_each_group_has_its_own_arguments_whatever_the_class_calls_them(registered):
    settings = registered(torch.optim.RMSprop, args=OwnArgs)
    assert "unexpected keyword argument 'scale'" in find_optimizer_errors(settings, parameters={"w": torch.ones(2)})[0]

    class Scaled(torch.optim.SGD):
        def __init__(self, params, *, lr, weight_decay, scale):
            super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=0.5 * scale)

    settings = registered(Scaled, args=OwnArgs)
    groups = [OptimizerGroup(pattern="a", lr=0.3, args={"scale": 0.5})]
    settings = Optimizer(name="Own", lr=0.1, weight_decay=0.2, decay_all_parameters=True, groups=groups)
    parameters = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
    container = build_optimizer(settings, named_parameters=parameters)
    container.set_factors(Factors(lr=0.5, weight_decay=2.0))
    (first, second) = container.torch_optimizers["Own"].param_groups
    assert [first[key] for key in ("lr", "weight_decay", "momentum")] == [0.15, 0.4, 0.25]
    assert [second[key] for key in ("lr", "weight_decay", "momentum")] == [0.05, 0.4, 0.5]


def keep_text(group, p, state):
    state["kind"] = "sign"


def keep_weights(group, p, state):
    state.setdefault("z", p.clone())


def count_in_group(group, p, state):
    group["k"] = group.get("k", 0) + 1


def forget_lr(group, p, state):
    del group["lr"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (keep_text, "has kind of type str in its state; checkpoints hold tensors and numbers"),
        (keep_weights, "begins with z that is not zeros; give init_state to register_optimizer"),
        (count_in_group, "changes k of its param groups in a step, which checkpoints do not hold"),
        (forget_lr, "keeps no lr in its param groups, so that no schedule can set it"),
        (lambda *_: 1 / 0, f"fails with these options: {__file__}:LINE: ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_what_checkpoints_or_schedules_cannot_follow_is_refused(registered, body, problem):
    settings = registered(optimizer_class(body))
    (message,) = find_optimizer_errors(settings, parameters={"w": torch.ones(2, 2), "b": torch.ones(2)})
    problem = problem.replace("LINE", str(body.__code__.co_firstlineno))
    problem = problem.replace(f"{Path.cwd()}/", "")
    assert message == f'optimizer "Own" {problem}'


def test_state_that_begins_with_something_else_is_given(registered):
    settings = registered(optimizer_class(keep_weights), init_state=lambda p: {"z": p.clone()})
    assert find_optimizer_errors(settings, parameters={"w": torch.ones(2, 2)}) == []
    container = build_optimizer(settings, named_parameters={"w": nn.Parameter(torch.ones(2, 2))})
    assert container.state_dict()["w/z"].tolist() == [[1, 1], [1, 1]]


def test_a_decay_that_a_class_cannot_do_is_refused(registered):
    class Plain(torch.optim.Optimizer):
        def __init__(self, params, *, lr):
            super().__init__(params, {"lr": lr})

    settings = registered(Plain)
    (message,) = find_optimizer_errors(settings, parameters={"w": torch.ones(2, 2)})
    assert message == 'optimizer "Own" takes no weight_decay; set optimizer.weight_decay = 0'
    with pytest.raises(ConfigError, match="must be a dataclass of options"):
        register_optimizer("Own", Plain, args=dict)
