"""A tensor-parallel plan names every parameter, and linear layers compute with plain tensors where they can."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.support.harness import run_ranks
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.plan import ColwiseGather, RowwiseScatter
from torchtitan_clone.ops.layers import Linear
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.parallel.tensor import apply_tensor_parallel

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


class TwoLayers(nn.Module):
    """Two linear layers with biases, of which tensor parallelism splits the one by columns and the other by rows."""

    def __init__(self, up, down):
        super().__init__()
        self.up = up(8, 6)
        self.down = down(6, 8)

    def forward(self, x_BTD):
        return self.down(self.up(x_BTD))


def two_layers(up, down):
    """Returns whether the layers compute with plain tensors, and largest differences of results and gradients."""
    torch.manual_seed(0)
    model, whole_BTD = TwoLayers(up, down), torch.randn(2, 4, 8, requires_grad=True)
    reference_BTD = model(whole_BTD)
    reference_BTD.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"": ColwiseGather("up"), "down": RowwiseScatter()})
        model.zero_grad()
        seen = []
        for layer in (model.up, model.down):
            layer.register_forward_pre_hook(lambda _layer, inputs: seen.append(type(inputs[0]) is torch.Tensor))
        whole = (whole_BTD, whole_BTD.grad, reference_BTD)
        x_BtD, x_grad_BtD, wanted_BtD = (x.detach().chunk(2, dim=1)[mesh.get_local_rank()] for x in whole)
        out_BtD = model(x_BtD.requires_grad_())
        out_BtD.square().sum().backward()
        differences = [(out_BtD - wanted_BtD).abs().max().item(), (x_BtD.grad - x_grad_BtD).abs().max().item()]
        for name, parameter in model.named_parameters():
            differences.append((parameter.grad.full_tensor() - wanted[name]).abs().max().item())
        return seen, differences


@pytest.mark.parametrize(
    ("up", "down", "plain"),
    [(Linear, Linear, [True, True]), (nn.Linear, Linear, [False, True]), (Linear, nn.Linear, [True, False])],
)
def test_layers_of_this_package_compute_with_plain_tensors(up, down, plain):
    for seen, differences in run_ranks(two_layers, 2, up, down):
        assert seen == plain
        assert all(difference < 1e-5 for difference in differences)
