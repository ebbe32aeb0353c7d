"""Tests of olmo_hybrid/__init__.py and olmo_hybrid/hf.py against transformers."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan_clone.config import ConfigError
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.olmo_hybrid import OlmoHybridArgs
from torchtitan_clone.models.rope import RopeScaling

SPEC = MODELS["olmo_hybrid"]
HUB = format_of(SPEC)
ARGS = OlmoHybridArgs(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=97, max_seq_len=256, linear_key_heads=4,
    linear_value_heads=4, linear_key_dim=12, linear_value_dim=24,
)  # fmt: skip
VARIANTS = {
    "": ARGS,
    "tied, positive, other pattern": replace(
        ARGS, tied_embeddings=True, negative_eigenvalues=False, layer_types=["full", "linear"], linear_key_heads=2
    ),
}


def test_exports_have_the_names_of_the_releases():
    """Norms of full attention and convolutions are not what transformers writes."""
    slices = HUB.map_state(SPEC.state_on_meta(ARGS), args=ARGS)
    found = {name: parts[0].source for name, parts in slices.items()}
    assert slices["layers.0.attention.v_conv.weight"][0].shape == (96, 1, 4)
    assert found["layers.0.attention_norm.weight"] == "model.layers.0.attention_layer_norm.weight"
    assert found["layers.0.ffn_norm.weight"] == "model.layers.0.feedforward_layer_norm.weight"
    assert found["layers.3.attention_norm.weight"] == "model.layers.3.post_attention_layernorm.weight"
    assert found["layers.3.ffn_norm.weight"] == "model.layers.3.post_feedforward_layernorm.weight"


def test_published_size():
    args = SPEC.flavors["7B"]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**HUB.to_config(args)))
    assert sum(x.numel() for x in SPEC.state_on_meta(args).values()) == theirs.num_parameters()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta must be null there"),
        ({"rope_parameters": None}, "rope_theta must be null there"),
        ({"rope_theta": 5e5}, "rope_theta must be null there"),
        ({"full_attention_interval": 2}, "full_attention_interval = 2, and olmo_hybrid supports only 4"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"linear_use_gate": True}, "linear_use_gate = True: olmo_hybrid has no such key"),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        HUB.from_config(HUB.to_config(ARGS) | changes)


def test_scaled_positions_are_refused():
    scaled = replace(ARGS, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=32))
    assert scaled.violations() == ["model.args.rope_scaling: no layer has rotary positions here; unset it"]
