"""A tensor-parallel plan must name every parameter."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.models import MODELS
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.parallel.tensor import apply_tensor_parallel
from torchtitan_clone.testing.harness import run_ranks

SPEC = MODELS["qwen3"]
ARGS = replace(SPEC.flavors["debugmodel"], dim=64, n_layers=2, head_dim=16)


def plan_without(*forgotten, replicated=()):
    plan = SPEC.tensor_plan(ARGS)
    styles = {name: style for name, style in plan.styles.items() if not name.endswith(forgotten)}
    return replace(plan, styles=styles, replicated=replicated)


def apply(forgotten, replicated, kept):
    """Returns the error, or the names of the parameters that are no DTensors."""
    plan = plan_without(*forgotten, replicated=replicated)
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        with torch.device("meta"):
            model = SPEC.build(ARGS)
        model.keep_modules(kept)
        try:
            apply_tensor_parallel(model, plan=plan, mesh=init_device_mesh("cpu", (2,)))
        except ConfigError as error:
            return str(error)
        return [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


@pytest.mark.parametrize(
    ("forgotten", "kept", "fragment"),
    [
        (("q_norm",), ["layers.1"], "layers.1.attention.q_norm.weight; give"),
        (("q_norm", "wo"), ["layers.0", "layers.1"], "layers.0.attention.wo.weight and 3 more parameters"),
        (("tok_embeddings",), ["tok_embeddings", "layers.0"], "tok_embeddings.weight"),
    ],
)
def test_a_parameter_that_the_plan_forgets_is_an_error_with_its_name(forgotten, kept, fragment):
    for answer in run_ranks(apply, 2, forgotten, (), kept):
        assert fragment in answer


def test_a_parameter_may_be_named_as_replicated():
    names = [f"layers.{index}.attention.k_norm.weight" for index in range(2)]
    kept = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    for answer in run_ranks(apply, 2, ("k_norm",), ("layers.*.attention.k_norm.weight",), kept):
        assert answer == names
