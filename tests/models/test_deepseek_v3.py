"""DeepSeek V3 and V2 against transformers."""

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config

from tests.models.twins import assert_logits_equal
from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.deepseek_v3.model import V2_ROUTER, DeepSeekV3Args
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.rope import RopeScaling

SPEC = MODELS["deepseek_v3"]
HUB = SPEC.hugging_face
MOE = replace(SPEC.flavors["debugmodel"].moe, hidden_dim=24)
ARGS = DeepSeekV3Args(
    dim=64, n_layers=3, n_heads=4, hidden_dim=96, n_dense_layers=1, q_lora_rank=24, kv_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, vocab_size=97, moe=MOE,
)  # fmt: skip
V2_MOE = MoEArgs(num_experts=8, top_k=3, hidden_dim=24, num_shared_experts=2, score_scale=1.5, **V2_ROUTER)
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
