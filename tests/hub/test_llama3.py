"""Tests of formats.py and keys.py: arguments against those of transformers, of Llama and of Qwen3."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.rope import RopeScaling

SPEC = MODELS["llama3"]
hf = format_of(SPEC)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SMALL = Llama3Args(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=97, hidden_dim=172)


def test_what_may_be_skipped_in_a_file():
    args = SPEC.flavors["debugmodel"]
    assert hf.is_leftover("model.layers.0.self_attn.rotary_emb.inv_freq", args=args)
    assert hf.is_leftover("lm_head.weight", args=replace(args, tied_embeddings=True))
    assert not hf.is_leftover("lm_head.weight", args=args)


def test_published_configs_of_both_versions_are_read():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    args = replace(SMALL, rope_scaling=RopeScaling(factor=8.0))
    common = {key: value for key, value in hf.to_config(args).items() if not key.startswith("rope")}
    old = {**common, "rope_theta": 500000, "rope_scaling": scaling | {"type": "llama3"}}
    new = {**common, "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 500000.0}}
    assert hf.from_config(old) == hf.from_config(new) == hf.arguments(args)


@pytest.mark.parametrize(
    "optional",
    [
        {},
        {"attention_factor": 1.5},
        {"attention_factor": 0.1 * math.log(4.0) + 1.0},
        {"beta_fast": 16, "beta_slow": 2.0, "truncate": False},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
    ],
)
def test_yarn_is_read_from_config_and_written_to_it(optional):
    base = {key: value for key, value in hf.to_config(SMALL).items() if not key.startswith("rope")}
    theirs = LlamaConfig(**base, rope_theta=1e4, rope_scaling=YARN | optional)
    values = hf.from_config(theirs.to_dict())
    assert values == hf.from_config({**base, "rope_theta": 1e4, "rope_scaling": YARN | optional})
    args = overlay(SMALL, {key: value for key, value in values.items() if value is not None}, where="model.args")
    assert hf.arguments(args) == values
    again = LlamaConfig(**hf.to_config(args))
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](again, torch.device("cpu"))
    expected, expected_magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert torch.equal(frequencies, expected)
    assert magnitude == pytest.approx(expected_magnitude, rel=1e-9)


@pytest.mark.parametrize(
    ("mscale", "of_all_dimensions"), [(2.0, 0.0), (0.707, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)]
)
def test_magnitudes_that_yarn_computes_from_one_factor_survive_an_export(mscale, of_all_dimensions):
    scaling = RopeScaling(rope_type="yarn", factor=40.0, mscale=mscale, mscale_all_dim=of_all_dimensions)
    config = hf.to_config(replace(SMALL, rope_scaling=scaling))
    _, magnitude = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**config), torch.device("cpu"))
    assert magnitude == pytest.approx(scaling.magnitude(), rel=1e-9)
    again = RopeScaling(**hf.from_config(config)["rope_scaling"])
    assert again.magnitude() == pytest.approx(scaling.magnitude(), rel=1e-9)


def test_a_scaling_that_was_added_to_a_config_is_read():
    """transformers 5 writes rope_parameters, and prefers rope_scaling."""
    config = LlamaConfig(**hf.to_config(SMALL)).to_dict() | {"rope_scaling": YARN}
    assert (
        hf.from_config(config)["rope_scaling"]
        == hf.from_config(hf.to_config(SMALL) | {"rope_scaling": YARN})["rope_scaling"]
    )


@pytest.mark.parametrize(("family", "config"), [("llama3", LlamaConfig), ("qwen3", Qwen3Config)])
def test_a_bare_config_has_the_defaults_of_transformers(family, config):
    bare = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    bare |= {"vocab_size": 9, "intermediate_size": 8}
    hub = format_of(MODELS[family])
    assert hub.from_config(bare) == hub.from_config(config(**bare).to_dict())


@pytest.mark.parametrize(
    ("family", "changes", "fragment"),
    [
        ("llama3", {"model_type": "mistral"}, "mistral"),
        ("llama3", {"attention_bias": True}, "attention_bias"),
        ("llama3", {"hidden_act": "gelu"}, "gelu"),
        ("llama3", {"head_dim": 32}, "head_dim = 32"),
        ("llama3", {"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no original_max_position_embeddings"),
        ("llama3", {"rope_scaling": YARN | {"mscale": 1.0}}, "one of mscale and mscale_all_dim"),
        ("llama3", {"rope_scaling": YARN | {"truncate": 1}}, "truncate = 1: must be true or false"),
        ("llama3", {"rope_scaling": YARN | {"truncate": None}}, "truncate = null: must be true or false"),
        ("llama3", {"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor = 0.0: must be above 0"),
        ("llama3", {"rope_scaling": YARN | {"original_max_position_embeddings": 2}}, "rotates beta_slow times"),
        ("llama3", {"rope_scaling": YARN | {"type": "linear"}}, "differs from type"),
        (
            "llama3",
            {"rope_scaling": YARN | {"low_freq_factor": 1.0}},
            "low_freq_factor = 1.0: a rope scaling of",
        ),
        ("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention = a table"),
        ("llama3", {"no_such_key": 1, "also": None}, "no_such_key = 1: llama3 has no such key; remove it"),
        (
            "llama3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: llama3 has only",
        ),
        ("llama3", {"is_causal": False}, "is_causal = False"),
        ("llama3", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen3", {"model_type": "llama"}, "qwen3 supports only 'qwen3'"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ("qwen3", {"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_unsupported_values_are_refused(family, changes, fragment):
    hub = format_of(MODELS[family])
    config = hub.to_config(SMALL if family == "llama3" else MODELS[family].flavors["debugmodel"]) | changes
    with pytest.raises(ConfigError, match=fragment):
        hub.from_config({key: value for key, value in config.items() if value is not None})
