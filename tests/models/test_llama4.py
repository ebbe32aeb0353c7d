"""Tests of llama4/model.py, llama4/plan.py and llama4/hf.py against transformers."""

import re
from dataclasses import replace

import pytest
from transformers import Llama4TextConfig

from tests.models.twins import assert_logits_equal
from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.models import MODELS

SPEC = MODELS["llama4"]
HUB = SPEC.hugging_face
ARGS = replace(
    SPEC.flavors["debugmodel"], dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=97, chunk=40,
    query_scale_floor=16, query_scale=0.5, moe=replace(SPEC.flavors["debugmodel"].moe, hidden_dim=24),
)  # fmt: skip
SCALING = replace(SPEC.flavors["17bx16e"].rope_scaling, original_max_seq_len=64)
VARIANTS = {
    "experts in every second layer": ARGS,
    "experts in every layer": replace(ARGS, moe_every=1, full_every=2, rope_scaling=SCALING),
    "no norm, two experts": replace(ARGS, qk_norm=False, moe=replace(ARGS.moe, top_k=2)),
    "no temperature": replace(ARGS, query_scale=0.0),
}


@pytest.mark.parametrize("args", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(args):
    assert args.violations() == []
    assert_logits_equal(SPEC, args)


def test_published_sizes():
    for flavor, size in {"17bx16e": 107_769_861_120, "17bx128e": 400_711_848_960}.items():
        args = SPEC.flavors[flavor]
        assert args.violations() == []
        assert sum(tensor.numel() for tensor in SPEC.state_on_meta(args).values()) == size, flavor


@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_config_round_trips_through_transformers(flavor):
    args = SPEC.flavors[flavor]
    for config in (HUB.to_config(args), Llama4TextConfig(**HUB.to_config(args)).to_dict()):
        assert HUB.from_config(config) == HUB.arguments(args)
        values = {key: value for key, value in HUB.from_config(config).items() if value is not None}
        base = replace(args, dim=8, chunk=8, moe_every=1, moe=replace(args.moe, num_experts=1))
        assert overlay(base, values, where="model.args") == args


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": [0]}, "moe_layers = .0., and llama4 supports only .1, 3. here"),
        ({"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
        ({"model_type": "llama4"}, "llama4 supports only 'llama4_text'"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ({"use_qk_norm": 1}, "use_qk_norm = 1: must be true or false"),
        ({"attn_scale": "x"}, "attn_scale"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 0}, "chunk = 0: must be"),
        ({"moe_every": 5}, "moe_every = 5: must be at most n_layers 4"),
        ({"moe": replace(ARGS.moe, score_func="softmax")}, "score_func = 'softmax': must be 'sigmoid'"),
        ({"moe": replace(ARGS.moe, top_k=9)}, "top_k = 9: must be at most 8"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    (found,) = replace(ARGS, **changes).violations()
    assert re.search(message, found), found
