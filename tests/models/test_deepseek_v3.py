"""Tests of mla.py, deepseek_v3/model.py, deepseek_v3/plan.py and deepseek_v3/hf.py against transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from tests.models.twins import assert_logits_equal, assert_round_trip
from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.deepseek_v3.model import V2_ROUTER, DeepSeekV3Args
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.ops.tensor_pieces import assemble_source, sources_of
from torchtitan_clone.run.hub import open_initial_weights

SPEC = MODELS["deepseek_v3"]
HUB = SPEC.hugging_face
MOE = replace(SPEC.flavors["debugmodel"].moe, hidden_dim=24)
ARGS = DeepSeekV3Args(
    dim=64, n_layers=3, n_heads=4, hidden_dim=96, n_dense_layers=1, q_lora_rank=24, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, vocab_size=97, moe=MOE,
)  # fmt: skip
V2_MOE = replace(V2_ROUTER, num_experts=8, top_k=3, hidden_dim=24, num_shared_experts=2, score_scale=1.5)
YARN = RopeScaling(rope_type="yarn", factor=40.0, original_max_seq_len=64, mscale=1.0, mscale_all_dim=1.0)
VARIANTS = {
    "V3": ARGS,
    "YaRN": replace(ARGS, rope_scaling=YARN),
    "YaRN with unequal mscale": replace(ARGS, rope_scaling=replace(YARN, mscale=0.707)),
    "no query latent": replace(ARGS, q_lora_rank=0),
    "values as large as keys": replace(ARGS, v_head_dim=24),
    "V2-Lite": replace(ARGS, q_lora_rank=0, moe=V2_MOE),
    "V2": replace(ARGS, moe=replace(V2_MOE, num_groups=4, top_groups=2)),
}


@pytest.mark.parametrize("args", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(args):
    assert args.violations() == []
    assert_logits_equal(SPEC, args)


@pytest.mark.parametrize("name", ["V3", "no query latent", "V2"])
def test_weights_of_transformers_return_unchanged(name):
    assert_round_trip(SPEC, VARIANTS[name])


def test_published_sizes():
    for flavor, size in {"16B": 15_706_484_224, "236B": 235_741_434_880, "671B": 671_026_419_200}.items():
        args = SPEC.flavors[flavor]
        assert args.violations() == []
        assert sum(tensor.numel() for tensor in SPEC.state_on_meta(args).values()) == size, flavor


def test_flops_count_active_experts_and_the_sizes_of_heads():
    """Counts 6 for each active parameter, and 6 x layers x heads x (keys + values) x tokens for attention."""
    parameters = SPEC.state_on_meta(ARGS)
    active = sum(
        tensor.numel() // 4 if ".experts." in name else tensor.numel()  # 2 of 8
        for name, tensor in parameters.items()
        if name != "tok_embeddings.weight" and not name.endswith("expert_bias")
    )
    parameters = {name: tensor for name, tensor in parameters.items() if not name.endswith("expert_bias")}
    flops = SPEC.flops_per_token(ARGS, parameters=parameters, seq_len=128, frozen_layers=0)
    assert flops == 6 * active + 6 * 3 * 4 * (24 + 12) * 128


@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_config_round_trips_through_transformers(flavor):
    args = SPEC.flavors[flavor]
    config = HUB.to_config(args)
    theirs = (DeepseekV2Config if config["model_type"] == "deepseek_v2" else DeepseekV3Config)(**config)
    assert theirs.n_routed_experts == args.moe.num_experts
    for each in (config, theirs.to_dict()):
        assert HUB.from_config(each) == HUB.arguments(args)
        values = {key: value for key, value in HUB.from_config(each).items() if value is not None}
        base = replace(args, dim=8, moe=replace(args.moe, num_experts=1, score_scale=1.0))
        assert replace(overlay(base, values, where="model.args"), n_kv_heads=None) == args


def hub_tensors(args):
    """Returns random tensors with the names and shapes that the hub has for a model."""
    random = torch.Generator().manual_seed(0)
    sources = sources_of(SPEC.hub_pieces(SPEC.state_on_meta(args), args=args))
    return {name: torch.randn(piece.shape, generator=random) for name, ((_, piece), *_) in sources.items()}


def written(folder, tensors, args):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HUB.to_config(args)))
    return folder


def imported(folder, args):
    """Returns our tensors after importing a folder, and the warnings."""
    state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in SPEC.state_on_meta(args).items()}
    weights = open_initial_weights(folder, spec=SPEC, model_args=args, state=state)
    weights.fill(state)
    return state, weights.warnings


@pytest.mark.parametrize("args", [ARGS, VARIANTS["V2-Lite"]], ids=["V3", "V2-Lite"])
def test_weights_of_the_hub_come_back_bit_equal(tmp_path, args):
    tensors = hub_tensors(args)
    extra = {f"model.layers.{args.n_layers}.eh_proj.weight": torch.zeros(2, 2)}
    state, warnings = imported(written(tmp_path / "hub", tensors | extra, args), args)
    assert warnings == ("leaves out the 1 tensors of model.layers.3.*, which predict the token after the next one",)
    sources = sources_of(SPEC.hub_pieces(state, args=args))
    for name, users in sources.items():
        assert torch.equal(assemble_source(users, read=state.__getitem__, dtype=torch.float32), tensors[name]), name
    # Pairs of neighbors in the 8 rotary rows of the shared key, which follow 16 of the latent.
    order = [*range(16), *range(16, 24, 2), *range(17, 24, 2)]
    theirs = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(state["layers.0.attention.wkv_a.weight"], theirs[order])


def test_matrices_in_8_bits_are_multiplied_by_the_scales_of_their_blocks(tmp_path):
    """Sizes are no multiples of the blocks, and rows of the queries are read in parts."""
    args = replace(ARGS, dim=136, q_lora_rank=200, hidden_dim=272)
    exact, stored = hub_tensors(args), {}
    for name, tensor in hub_tensors(args).items():
        if not re.search(r"_proj|experts", name):
            stored[name] = tensor
            continue
        shape = tensor.shape
        scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
        stored[name], stored[f"{name}_scale_inv"] = tensor.to(torch.float8_e4m3fn), scales
        by_value = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
        exact[name] = stored[name].float() * by_value
    state, _ = imported(written(tmp_path / "hub", stored, args), args)
    for name, users in sources_of(SPEC.hub_pieces(state, args=args)).items():
        assert torch.equal(assemble_source(users, read=state.__getitem__, dtype=torch.float32), exact[name]), name


def test_bad_folders_are_refused(tmp_path):
    tensors = hub_tensors(ARGS)
    experts = "model.layers.1.mlp.experts"
    missing = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{experts}.3.")}
    weight = f"{experts}.0.up_proj.weight"
    quantized = tensors | {weight: tensors[weight].to(torch.float8_e4m3fn)}
    scaled = quantized | {f"{weight}_scale_inv": torch.ones(24, 1)}
    more = tensors | {f"{experts}.8.up_proj.weight": tensors[weight].clone()}
    cases = [
        (missing, f"lacks {experts}.3.gate_proj.weight, {experts}.3.down_proj.weight, {experts}.3.up_proj.weight$"),
        (quantized, f"{weight} has type F8_E4M3; quantized weights cannot be trained on"),
        (scaled, r"_scale_inv has type F32 and shape \[24, 1\], and blocks of 128 x 128 have F32 and \[1, 1\]"),
        (more, f"holds {experts}.8.up_proj.weight, which deepseek_v3 does not have"),
    ]
    for number, (content, message) in enumerate(cases):
        with pytest.raises(ConfigError, match=message):
            imported(written(tmp_path / str(number), content, ARGS), ARGS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 2}, "n_kv_heads = 2: latent attention has as many as n_heads; unset it"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 must be even"),
        ({"v_head_dim": 25}, "v_head_dim = 25: must be at most qk_nope_head_dim [+] qk_rope_head_dim = 24"),
        ({"n_dense_layers": 3}, "n_dense_layers = 3: must be below n_layers 3"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0: must be from 1"),
        ({"moe": replace(MOE, expert_bias=False)}, "expert_bias = False: must be True with score_func 'sigmoid'"),
        ({"moe": replace(MOE, num_shared_experts=0)}, "num_shared_experts = 0: must be at least 1"),
        ({"moe": replace(MOE, num_groups=3)}, "num_groups = 3: must divide num_experts"),
        ({"moe": replace(MOE, top_k=5)}, "top_k = 5: must be at most 4, the experts that a token may choose"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    (found,) = replace(ARGS, **changes).violations()
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "deepseek_v3 supports only 'deepseek_v3'"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": "24"}, 'q_lora_rank = "24": must be an integer'),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({"routed_scaling_factor": "big"}, "routed_scaling_factor"),
        ({"n_routed_experts": 1e400}, "n_routed_experts"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)
