"""Tests of plan.py, llama3/plan.py and qwen3/plan.py: every style of a tensor-parallel plan names modules."""

from fnmatch import fnmatchcase

import pytest
import torch

from torchtitan_clone.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_style_and_every_replicated_name_is_of_the_model(name):
    """torch ignores a style whose pattern matches no module: a renamed module would stay unsharded."""
    spec = MODELS[name]
    args = spec.flavors["debugmodel"]
    with torch.device("meta"):
        model = spec.build(args)
    plan = spec.tensor_plan(args)
    modules = [module for module, _ in model.named_modules()]
    unused = [pattern for pattern in plan.styles if not any(fnmatchcase(module, pattern) for module in modules)]
    assert not unused
    parameters = [parameter for parameter, _ in model.named_parameters()]
    assert all(any(fnmatchcase(parameter, pattern) for parameter in parameters) for pattern in plan.replicated)
