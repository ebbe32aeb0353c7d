"""Tests of qwen3_5/model.py and qwen3_5/hf.py, delta_net.py, gated_attention.py and hybrid.py against transformers.

Of Qwen3.5, dense and with experts, and of Qwen3-Next.
"""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from tests.support.twins import config_of
from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.hub.weights import model_of_folder, open_initial_weights
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.models.qwen3_5.model import ROUTER, Qwen3_5Args, Qwen3_5MoEArgs
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.spec import active_parameters
from torchtitan_clone.parallel.init_weights import init_weights

SPEC = MODELS["qwen3_5"]
HUB = format_of(SPEC)
SIZES = {
    "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "vocab_size": 97, "max_seq_len": 256,
    "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 16, "linear_value_dim": 24, "rope_theta": 1e4,
    "rotary_dim": 8,
}  # fmt: skip
ARGS = Qwen3_5Args(**SIZES, hidden_dim=96)
MOE_ARGS = Qwen3_5MoEArgs(**SIZES, moe=replace(ROUTER, num_experts=8, top_k=3, hidden_dim=24, num_shared_experts=2))
VARIANTS = {
    "qwen3_5": ARGS,
    "qwen3_5, tied, equal heads": replace(ARGS, tied_embeddings=True, linear_value_heads=2),
    "qwen3_5, other pattern": replace(ARGS, layer_types=["full", "linear"], n_kv_heads=None, linear_conv=3),
    "qwen3_5, stretched": replace(
        ARGS, rotary_dim=16, rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_seq_len=64)
    ),
    "qwen3_5_moe": MOE_ARGS,
    "qwen3_next": MOE_ARGS,
    "qwen3_next, tied, equal heads": replace(MOE_ARGS, tied_embeddings=True, linear_value_heads=2),
}


def spec_of(name):
    """Returns the family of a variant."""
    return MODELS[name.split(",")[0]]


def test_published_sizes():
    """Those of the text models of the releases, counted by transformers."""
    flavors = {"0.8B": "qwen3_5", "27B": "qwen3_5", "35B-A3B": "qwen3_5_moe", "80B-A3B": "qwen3_next"}
    for flavor, family in flavors.items():
        spec = MODELS[family]
        args = spec.flavors[flavor]
        args = replace(args, n_layers=4) if args.num_experts else args  # the next test counts all
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config_of(spec, args)).num_parameters()
        assert sum(tensor.numel() for tensor in spec.state_on_meta(args).values()) == theirs, flavor


@pytest.mark.parametrize(
    ("family", "flavor", "total", "active"),
    [
        ("qwen3_next", "80B-A3B", 79.7e9, 3.9e9),
        ("qwen3_5_moe", "35B-A3B", 34.66e9, 3.46e9),
        ("qwen3_5_moe", "122B-A10B", 122.1e9, 9.8e9),
        ("qwen3_5_moe", "397B-A17B", 396.3e9, 17.3e9),
    ],
)
def test_published_sizes_of_experts(family, flavor, total, active):
    """Those in the names of the releases, with embeddings."""
    args = MODELS[family].flavors[flavor]
    state = MODELS[family].state_on_meta(args)
    counts = [sum(x.numel() for x in tensors.values()) for tensors in (state, active_parameters(args, state))]
    assert counts == [pytest.approx(total, rel=0.002), pytest.approx(active, rel=0.01)]


VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip


def published(folder, name):
    """Returns a model with images, and writes it as releases have it: text, images, prediction, experts stacked."""
    torch.manual_seed(0)
    hub, args = format_of(spec_of(name)), VARIANTS[name]
    text = hub.to_config(args) | {"full_attention_interval": 4, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    if args.num_experts:
        config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
        theirs = Qwen3_5MoeForConditionalGeneration(config).eval()
    else:
        theirs = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.05)
    theirs.save_pretrained(folder)
    if args.num_experts:
        assert not any(name.endswith("experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    save_file(theirs.state_dict() | {"mtp.norm.weight": torch.zeros(64)}, folder / "model.safetensors")
    return theirs


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_published_folder_is_imported(name, tmp_path):
    theirs, spec = published(tmp_path, name), spec_of(name)
    hub = format_of(spec)
    args = spec.resolve_args(model_of_folder(open_weight_folder(tmp_path), spec=spec))
    assert hub.arguments(args) == hub.arguments(VARIANTS[name])
    model = spec.build(args)
    state = {name: tensor.detach() for name, tensor in named_state(model).items()}
    weights = open_initial_weights(tmp_path, spec=spec, model_args=args, state=state)
    images, prediction = weights.warnings
    assert re.fullmatch(r"leaves out the \d+ tensors of model\.visual\.\*, which encode images", images)
    assert prediction == "leaves out the 1 tensors of mtp.*, which predict tokens after the next one"
    weights.fill(state)
    tokens_BT = torch.randint(0, 90, (2, 100))
    with torch.no_grad():
        ours = model(tokens_BT, positions_BT=torch.arange(100).expand(2, 100))
        torch.testing.assert_close(ours, theirs(tokens_BT).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("absent", ["1.mlp.experts.down_proj", "3.mlp.experts.gate_up_proj", "0.linear_attn.A_log"])
def test_a_published_folder_without_a_tensor_is_refused_by_its_name(absent, tmp_path):
    published(tmp_path, "qwen3_5_moe")
    file, name, spec = tmp_path / "model.safetensors", f"model.language_model.layers.{absent}", MODELS["qwen3_5_moe"]
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
    with pytest.raises(ConfigError, match=f"lacks {re.escape(name)}$"):
        open_initial_weights(tmp_path, spec=spec, model_args=MOE_ARGS, state=spec.state_on_meta(MOE_ARGS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads = 0"),
        ({"attn_output_gate": False}, "attn_output_gate = False, and qwen3_5 supports only True"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16', and qwen3_5 supports only 'float32'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": "x"}}, "partial_rotary_factor"),
        ({"linear_attn_scale": 2.0}, "linear_attn_scale = 2.0: qwen3_5 has no such key"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_expert_intermediate_size": 36}, "= 36: must be a multiple of moe_intermediate_size 24"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False, and qwen3_next supports only True"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\], and qwen3_next supports only \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': qwen3_next has no such key"),
    ],
)
def test_unsupported_hub_configs_of_experts_are_refused(changes, message):
    hub = format_of(MODELS["qwen3_next"])
    with pytest.raises(ConfigError, match=message):
        hub.from_config(hub.to_config(MOE_ARGS) | changes)


@pytest.mark.parametrize(
    ("beside", "text", "message"),
    [
        ({"x": 1}, {}, "x = 1: beside text_config qwen3_5 has no such key"),
        ({}, {"tie_word_embeddings": True}, "tie_word_embeddings = False and True: must be equal"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings = True and False: must be equal"),
    ],
)
def test_what_is_beside_the_text_model_must_agree_with_it(beside, text, message):
    own = {key: value for key, value in HUB.to_config(ARGS).items() if key != "tie_word_embeddings"}
    assert HUB.from_config({"model_type": "qwen3_5", "text_config": own}) == HUB.from_config(own)
    with pytest.raises(ConfigError, match=message):
        HUB.from_config({"model_type": "qwen3_5", "text_config": own | text, **beside})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full"] * 3}, "layer_types has 3 entries, which must divide n_layers 4"),
        ({"linear_value_heads": 3}, "linear_value_heads = 3: must be a multiple of linear_key_heads 2"),
        ({"linear_conv": 1}, "linear_conv = 1: must be"),
        ({"rotary_dim": 34}, "rotary_dim = 34: must be even, and at most head_dim 32"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    assert message in replace(ARGS, **changes).violations()[0]


def test_a_gate_needs_shared_experts():
    changed = replace(MOE_ARGS, moe=replace(MOE_ARGS.moe, num_shared_experts=0))
    assert changed.violations() == [
        "model.args.moe.shared_gate = true: needs shared experts; set num_shared_experts to 1 or more"
    ]


def test_flops_count_the_products_with_states():
    """Of a linear layer 6 K V a head in forward, whatever the length of the row; attention grows with it."""
    args = replace(ARGS, linear_value_heads=16)
    parameters = SPEC.state_on_meta(args)
    layers = [
        [SPEC.layer_flops(args, parameters=parameters, seq_len=T)[layer] for T in (512, 1024)] for layer in (0, 3)
    ]
    sizes = [sum(p.numel() for name, p in parameters.items() if name.startswith(f"layers.{i}.")) for i in (0, 3)]
    assert layers[0] == pytest.approx([6 * sizes[0] + 3 * 6 * 16 * 16 * 24] * 2, rel=1e-3)
    assert layers[1] == [6 * sizes[1] + 12 * 4 * 32 * T for T in (512, 1024)]


def test_initial_values_of_decays():
    """Heads forget between a thousandth and most of their state at a token, and norms multiply by one."""
    parameters = dict(SPEC.build(replace(ARGS, linear_key_heads=64, linear_value_heads=64)).named_parameters())
    init_weights(parameters, seed=0, std_of=partial(SPEC.initial_std, ARGS))
    decay = {name: parameters[f"layers.0.attention.decay.{name}"].detach() for name in ("A_log", "dt_bias")}
    assert decay["A_log"].exp().aminmax() == (pytest.approx(0.01, abs=1.0), pytest.approx(16.0, abs=1.0))
    steps = F.softplus(decay["dt_bias"])
    assert steps.aminmax() == (pytest.approx(1e-3, rel=0.5), pytest.approx(1e-1, rel=0.5))
    assert not parameters["norm.weight"].any()
    assert bool((parameters["layers.0.attention.norm.weight"] == 1).all())
    assert parameters["layers.0.attention.q_conv.weight"].std().item() == pytest.approx(12**-0.5, rel=0.1)


def test_a_packed_document_gets_the_logits_that_it_gets_alone():
    """State and convolution end with a document, in every layer."""
    torch.manual_seed(0)
    model = SPEC.build(ARGS)
    documents_BT = torch.tensor([[0] * 37 + [1] + [2] * 2 + [3] * 110])
    tokens_BT = torch.randint(0, 97, (1, 150))
    positions_BT = torch.cat([torch.arange(n) for n in (37, 1, 2, 110)])[None]
    with torch.no_grad():
        packed = model(tokens_BT, positions_BT=positions_BT, documents_BT=documents_BT)
        for part in (slice(37), slice(37, 38), slice(38, 40), slice(40, 150)):
            alone = model(tokens_BT[:, part], positions_BT=positions_BT[:, part])
            torch.testing.assert_close(packed[:, part], alone, rtol=1e-5, atol=1e-5)
