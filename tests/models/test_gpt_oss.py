"""Tests of gpt_oss/model.py, gpt_oss/hf.py and gpt_oss/plan.py against transformers."""

import json
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from safetensors.torch import save_file
from torch._dynamo.backends.common import aot_autograd
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import open_initial_weights
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.gpt_oss.model import GptOssArgs
from torchtitan_clone.models.moe import Experts, MoEArgs
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of

SPEC = MODELS["gpt_oss"]
HUB = format_of(SPEC)
MOE = MoEArgs(num_experts=8, top_k=3, hidden_dim=24, biases=True, swiglu_limit=7.0)
ARGS = GptOssArgs(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=97, max_seq_len=256, window=13, moe=MOE,
    rope_theta=1e4, rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_seq_len=64, truncate=False),
)  # fmt: skip
VARIANTS = {
    "": ARGS,
    "small limit": replace(ARGS, moe=replace(MOE, swiglu_limit=0.02)),  # which most values exceed
    "tied, unscaled": replace(ARGS, tied_embeddings=True, rope_scaling=None),
    "full layers": replace(ARGS, layer_types=["full"], moe=replace(MOE, top_k=1)),
}


def test_biases_start_at_zero():
    stds = {name: SPEC.initial_std(ARGS, name) for name in SPEC.state_on_meta(ARGS)}
    assert {std for name, std in stds.items() if "bias" in name} == {0.0}
    assert sum("bias" in name for name in stds) == 4 * (4 + 1 + 3)
    assert stds["layers.0.attention.sinks.weight"] == 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "model.args.window = 0: must be"),
        ({"layer_types": ["full"] * 3}, "layer_types has 3 entries, which must divide n_layers 4"),
        ({"head_dim": 31}, "head_dim = 31 must be even"),
        ({"moe": replace(MOE, biases=False)}, "biases = false, swiglu_limit = 7.0: gpt_oss has both"),
        ({"moe": replace(MOE, swiglu_limit=-1.0)}, "model.args.moe.swiglu_limit = -1.0"),
        ({"moe": replace(MOE, top_k=9)}, "top_k = 9"),
        ({"moe": replace(MOE, num_shared_experts=1)}, "num_shared_experts = 1: gpt_oss has none; set it to 0"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    assert message in replace(ARGS, **changes).violations()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = 'gptq': gpt_oss supports only"),
        ({"quantization_config": 4}, "quantization_config = 4: gpt_oss supports only"),
        ({"attention_bias": False}, "attention_bias"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"swiglu_limit": "7"}, 'swiglu_limit = "7": must be a number'),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


QUANTIZED = replace(ARGS, moe=replace(MOE, hidden_dim=32))
PACKED = ("gate_up_proj", "down_proj")


def quantized_tensors():
    """Returns tensors as the releases have them, and what transformers makes of those in 4 bits."""
    state = SPEC.state_on_meta(QUANTIZED)
    sources = sources_of(format_of(SPEC).map_state(state, args=QUANTIZED))
    shapes = {name: part.shape for name, ((_, part), *_) in sources.items()}
    random = torch.Generator().manual_seed(0)
    stored, exact = {}, {}
    for name, shape in shapes.items():
        if not name.endswith(PACKED):
            stored[name] = exact[name] = torch.randn(shape, generator=random)
            continue
        experts, columns, rows = shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(100, 140, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert exact[name].shape == shape
    return stored, exact


def write(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = HUB.to_config(QUANTIZED) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_in_4_bits_are_read_as_by_transformers(tmp_path):
    stored, exact = quantized_tensors()
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in SPEC.state_on_meta(QUANTIZED).items()}
    weights = open_initial_weights(write(tmp_path / "hub", stored), spec=SPEC, model_args=QUANTIZED, state=state)
    weights.fill(state)
    for name, users in sources_of(format_of(SPEC).map_state(state, args=QUANTIZED)).items():
        assert torch.equal(assemble_source(users, read=state.get, dtype=torch.float32), exact[name]), name


def test_bad_parts_of_experts_in_4_bits_are_refused(tmp_path):
    stored, _ = quantized_tensors()
    name = "model.layers.0.mlp.experts.down_proj"
    without = {key: tensor for key, tensor in stored.items() if key != f"{name}_scales"}
    cases = [
        (without, f"lacks {name}\n.*holds {name}_blocks, which gpt_oss does not have"),
        (
            stored | {f"{name}_blocks": stored[f"{name}_blocks"][:7].clone()},
            rf"{name}_blocks has type U8 and shape \[7, ",
        ),
        (stored | {f"{name}_scales": stored[f"{name}_scales"].float()}, f"{name}_scales has type F32"),
        ({key: tensor for key, tensor in stored.items() if key != f"{name}_blocks"}, f"lacks {name}_blocks$"),
    ]
    state = SPEC.state_on_meta(QUANTIZED)
    for number, (tensors, message) in enumerate(cases):
        with pytest.raises(ConfigError, match=message):
            open_initial_weights(write(tmp_path / str(number), tensors), spec=SPEC, model_args=QUANTIZED, state=state)


def test_gradients_of_biases_of_experts_in_bfloat16_are_those_of_float32():
    experts = Experts(MoEArgs(num_experts=2, hidden_dim=16, biases=True), dim=16).to(torch.bfloat16)
    rows = torch.zeros(4096, 16, dtype=torch.bfloat16)
    ends = torch.tensor([4096, 4096], dtype=torch.int32)
    out = experts._product(rows, experts.w1, experts.w1_bias, ends)
    out.backward(torch.ones_like(out))
    assert experts.w1_bias.grad[0].tolist() == [4096.0] * 16


def test_compiled_gradients_of_biases_are_summed_in_a_fixed_order():
    """Inductor adds by atomics, in the order in which threads come, where an index_put() accumulates."""
    called = []

    def note(graph, _inputs):
        called.append([(str(node.target), node.args) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    model = SPEC.build(replace(ARGS, n_layers=1))
    block = torch.compile(model.layers["0"], backend=aot_autograd(fw_compiler=note), fullgraph=True)
    model.layers["0"] = block
    model(torch.arange(64)[None], positions_BT=torch.arange(64)[None]).sum().backward()
    _forward, backward = called
    assert sum("group_sums" in name for name, _ in backward) == 3
    assert not [args for name, args in backward if "index_put" in name and True in args]
