"""Qwen3's tensors and arguments against those of transformers."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.models.twins import assert_tensors_are
from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.qwen3.model import Qwen3Args

SPEC = MODELS["qwen3"]
hf = format_of(SPEC)
SMALL = Qwen3Args(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, vocab_size=97)


@pytest.mark.parametrize("flavor", SPEC.flavors)
def test_config_round_trips_through_transformers(flavor):
    args = SPEC.flavors[flavor]
    theirs = Qwen3Config(**hf.to_config(args))
    assert theirs.head_dim == args.head_dim
    for config in (hf.to_config(args), theirs.to_dict()):
        values = hf.from_config(config)
        assert values == hf.arguments(args)
        given = {key: value for key, value in values.items() if value is not None}
        assert overlay(SPEC.flavors["debugmodel"], given, where="model.args") == args


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_of_transformers(tied):
    args = replace(SMALL, tied_embeddings=tied)
    with torch.device("meta"):
        theirs = dict(Qwen3ForCausalLM(Qwen3Config(**hf.to_config(args))).named_parameters())
    assert_tensors_are(SPEC, args, theirs)


def test_a_bare_config_has_the_defaults_of_transformers():
    bare = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 9,
        "intermediate_size": 8,
    }
    assert hf.from_config(bare) == hf.from_config(Qwen3Config(**bare).to_dict())


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"model_type": "llama"}, "qwen3 supports only 'qwen3'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_unsupported_values_are_refused(changes, fragment):
    config = {key: value for key, value in (hf.to_config(SMALL) | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=fragment):
        hf.from_config(config)
