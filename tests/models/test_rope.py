"""Rotary positions: YaRN against transformers, partial rotation, and what layers without positions get."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.twins import assert_logits_equal
from tests.ops.test_layers import Operators
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.keys import scaling_to_config
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.qwen3.model import Qwen3Args
from torchtitan_clone.models.rope import (
    QueryScale,
    RopeArgs,
    RopeScaling,
    Rotary,
    apply_positions,
    inverse_frequencies,
    rotate,
)

CPU = torch.device("cpu")
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_seq_len=64)
SCALINGS = {
    "published gpt-oss": replace(YARN, factor=32.0, original_max_seq_len=4096, truncate=False),
    "published OLMo 3": replace(YARN, factor=8.0, original_max_seq_len=8192),
    "published DeepSeek V3": replace(YARN, factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0),
    "lower boundary below 0": replace(YARN, original_max_seq_len=150),
    "both boundaries 0": replace(YARN, original_max_seq_len=6),
    "reversed boundaries": replace(YARN, original_max_seq_len=64, beta_fast=0.5, truncate=False),
    "given magnitude": replace(YARN, attention_factor=1.25),
    "unequal mscale": replace(YARN, mscale=0.7, mscale_all_dim=0.3),
    "no stretching": replace(YARN, factor=1.0),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 150000.0])
def test_yarn_equals_transformers(scaling, theta):
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=1 << 17,
        rope_parameters={"rope_theta": theta, **scaling_to_config(scaling)},
    )  # fmt: skip
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    found = inverse_frequencies(64, theta=theta, scaling=scaling, device=CPU)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert scaling.magnitude() == pytest.approx(magnitude, rel=1e-12)


def test_yarn_stretches_all_pairs_that_never_rotate():
    """transformers clamps the boundaries to an interval that ends before it begins, and stretches nothing."""
    scaling = replace(YARN, original_max_seq_len=1)
    found = inverse_frequencies(64, theta=1e4, scaling=scaling, device=CPU)
    expected = inverse_frequencies(64, theta=1e4, scaling=None, device=CPU) / 4
    torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_logits_with_yarn_equal_transformers(name):
    changes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 97}
    args = {"llama3": Llama3Args, "qwen3": Qwen3Args}[name](
        **changes, **({"head_dim": 32} if name == "qwen3" else {}), rope_theta=1e4, max_seq_len=256, rope_scaling=YARN
    )
    assert args.violations() == []
    assert_logits_equal(MODELS[name], args)


def test_yarn_does_not_depend_on_the_length_of_rows():
    lengths = (64, 256, 1 << 17)
    models = [MODELS["qwen3"].build(Qwen3Args(dim=64, n_layers=1, vocab_size=9, max_seq_len=length, rope_scaling=YARN))
              for length in lengths]  # fmt: skip
    for positions in (torch.arange(10)[None], torch.arange(300)[None]):
        for model in models:
            for found, expected in zip(model.rotary[0](positions), models[0].rotary[0](positions), strict=True):
                assert torch.equal(found, expected)
    cos, _ = models[0].rotary[0](torch.zeros(1, 1, dtype=torch.int64))
    assert torch.equal(cos, torch.full_like(cos, YARN.magnitude()))


def test_a_theta_without_wavelengths_is_named():
    args = Qwen3Args(rope_theta=1.0, rope_scaling=YARN)
    assert args.violations() == ["model.args.rope_theta = 1.0: must be above 1 with YaRN; set for example 10000.0"]
    assert replace(args, rope_scaling=None).violations() == []


def test_partial_rotation_leaves_the_other_features():
    torch.manual_seed(0)
    x_BTNH = torch.randn(1, 5, 2, 12)
    rotary = Rotary(RopeArgs(dim=8, theta=1e4))
    rotary.init_buffers()
    positions = rotary(torch.arange(5)[None])
    q, k = apply_positions(x_BTNH, x_BTNH, positions)
    assert torch.equal(q, k)
    assert torch.equal(q[..., :8], rotate(x_BTNH[..., :8], *positions))
    assert torch.equal(q[..., 8:], x_BTNH[..., 8:])
    assert not torch.equal(q[:, 1:, :, :8], x_BTNH[:, 1:, :, :8])


def angles(features):
    """Returns the angles [2, 7, 1, features / 2] of seven positions of two rows."""
    rotary = Rotary(RopeArgs(dim=features, theta=1e4))
    rotary.init_buffers()
    return (torch.arange(7)[:, None, None] * rotary.inv_freq).repeat(2, 1, 1, 1), rotary(torch.arange(7).repeat(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [2, 12, 64])
def test_rotation_and_its_gradient_equal_the_formula_to_the_bit(features, dtype):
    """Each half of the features times its cosines, plus the other half, the second one negated, times its sines."""
    torch.manual_seed(0)
    angles_BT1r, positions = angles(features)
    cos, sin = (each.repeat(1, 1, 1, 2) for each in (angles_BT1r.cos(), angles_BT1r.sin()))
    x, grad = torch.randn(2, 2, 7, 3, features).to(dtype)
    inputs = [x.float().clone().requires_grad_(), x.clone().requires_grad_()]  # a gradient is rounded once
    first, second = inputs[0].chunk(2, dim=-1)
    expected = (inputs[0] * cos + torch.cat((-second, first), dim=-1) * sin).to(dtype)
    found = rotate(inputs[1], *positions)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    expected.backward(grad)
    found.backward(grad)
    assert torch.equal(inputs[1].grad, inputs[0].grad.to(dtype))
    assert torch.equal(x, inputs[1])
    assert not torch.equal(found[:, 1:], x[:, 1:])


def test_a_rotation_launches_four_kernels_in_each_direction():
    """The host launches them one by one, which takes longer than small models compute on a GPU."""
    x = torch.empty(2, 7, 3, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    cos, sin = torch.empty(2, 2, 7, 1, 64, device="meta")
    aten = torch.ops.aten
    kernels = [aten.roll.default, aten.mul.Tensor, aten.mul.Tensor, aten.add.out]
    with Operators() as forward:
        out = rotate(x, cos, sin)
    with Operators() as backward:
        out.backward(torch.empty_like(out))
    for each in (forward, backward):
        launched = [call for call in each.called if not call.is_view and "empty" not in call.name()]
        assert sorted(launched, key=str) == sorted(kernels, key=str)


def test_compiled_it_takes_one_pass_in_each_direction():
    """Each half of a concatenation would be computed by itself, and backward would keep both in memory."""
    graphs = []

    def note(graph, _inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    x, grad = torch.randn(2, 2, 7, 3, 64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    _, positions = angles(64)
    compiled = torch.compile(rotate, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    found, expected = (function(each, *positions) for function, each in zip((compiled, rotate), inputs, strict=True))
    assert torch.equal(found, expected)
    found.backward(grad)
    expected.backward(grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    pointwise = {"aten.mul.Tensor", "aten.add.Tensor", "aten.view.default", "aten.flip.default"}
    assert [called - pointwise for called in graphs] == [set(), set()]


def test_layers_without_positions_rotate_nothing():
    q, k = torch.randn(2, 1, 9, 2, 4)
    assert apply_positions(q, k, Rotary(None)(torch.arange(9)[None])) == (q, k)
    scaled, same = apply_positions(q, k, Rotary(QueryScale(scale=0.5, floor=4))(torch.arange(9)[None]))
    assert same is k
    steps = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2.0])
    torch.testing.assert_close(scaled, q * (1 + 0.5 * (1 + steps).log())[:, None, None])


def test_configs_of_transformers_with_yarn_are_read():
    hub = format_of(MODELS["qwen3"])
    config = Qwen3Config(rope_parameters={"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0,
                                          "original_max_position_embeddings": 32768})  # fmt: skip
    found = hub.from_config(config.to_dict())["rope_scaling"]
    assert RopeScaling(**found) == replace(YARN, original_max_seq_len=32768)
