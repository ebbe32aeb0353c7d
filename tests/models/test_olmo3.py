"""Tests of olmo3/model.py, olmo3/hf.py and olmo3/plan.py, windowed.py and layer_kinds.py: OLMo against transformers."""

from dataclasses import replace

import pytest
import torch

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.olmo3.model import Olmo2Args, Olmo3Args
from torchtitan_clone.models.rope import RopeArgs, RopeScaling
from torchtitan_clone.ops.layers import RMSNormOfHeads

SIZES = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 97}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_seq_len=64)
OLMO3 = Olmo3Args(**SIZES, window=13, max_seq_len=256)
VARIANTS = {
    "olmo3": ("olmo3", OLMO3),
    "olmo3 stretched": ("olmo3", replace(OLMO3, rope_scaling=YARN, rope_theta=1e4)),
    "olmo3 multi-head tied": ("olmo3", replace(OLMO3, n_kv_heads=None, tied_embeddings=True, window=1)),
    "olmo3 other pattern": ("olmo3", replace(OLMO3, layer_types=["full", "window"])),
    "olmo2": ("olmo2", Olmo2Args(**SIZES, max_seq_len=256)),
    "olmo2 stretched": ("olmo2", Olmo2Args(**SIZES, max_seq_len=256, rope_scaling=YARN)),
}


def test_a_config_of_a_release_is_read():
    """As published: one rope_scaling, for the full layers only, and no types of layers of their own."""
    hub = format_of(MODELS["olmo3"])
    config = {
        "model_type": "olmo3", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 97,
        "intermediate_size": 96, "rope_theta": 500000, "rms_norm_eps": 1e-6, "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "beta_fast": 32.0,
                         "beta_slow": 1.0, "original_max_position_embeddings": 8192},
    }  # fmt: skip
    values = {key: value for key, value in hub.from_config(config).items() if value is not None}
    args = overlay(OLMO3, values, where="model.args")
    scaling = RopeScaling(rope_type="yarn", factor=8.0, original_max_seq_len=8192)
    window = LayerKind(positions=RopeArgs(dim=16, theta=500000.0), window=4096)
    full = LayerKind(positions=RopeArgs(dim=16, theta=500000.0, scaling=scaling))
    assert args.layer_kinds() == [window, window, window, full] * 2


@pytest.mark.parametrize("seq_len", [8, 20])
@pytest.mark.parametrize("limit", [{}, {"window": 8}, {"chunk": 8}])
def test_tokens_attend_to_as_many_on_average_as_a_mask_has(limit, seq_len):
    kind = LayerKind(positions=None, **limit)
    seen = [
        token % kind.chunk + 1 if kind.chunk else min(token + 1, kind.window or seq_len) for token in range(seq_len)
    ]
    assert kind.mean_attended_tokens(seq_len) == pytest.approx(sum(seen) / seq_len, abs=0.6)


def test_attention_counts_as_flops_up_to_the_window():
    spec, args = MODELS["olmo3"], OLMO3
    parameters = spec.state_on_meta(args)
    size = sum(p.numel() for p in parameters.values()) - 97 * 64
    for seq_len, attended in ((10, 10 + 3 * 10), (100, 100 + 3 * 13)):
        flops = spec.flops_per_token(args, parameters=parameters, seq_len=seq_len, frozen_layers=0)
        assert flops == 6 * size + 12 * 64 * attended
        frozen = spec.flops_per_token(args, parameters=parameters, seq_len=seq_len, frozen_layers=4)
        blocks = sum(p.numel() for name, p in parameters.items() if name.startswith("layers."))
        assert frozen == pytest.approx(flops - 4 * blocks - 8 * 64 * attended)


def test_the_norm_of_all_heads_is_that_of_torch():
    torch.manual_seed(0)
    norm = RMSNormOfHeads(24, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    x_BTNH = torch.randn(2, 5, 3, 8)
    expected = torch.nn.functional.rms_norm(x_BTNH.flatten(2), (24,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x_BTNH).flatten(2), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "model.args.window = 0: must be"),
        ({"layer_types": ["full"] * 3}, "model.args.layer_types has 3 entries, which must divide n_layers 4"),
        ({"layer_types": []}, "model.args.layer_types has 0 entries"),
        ({"n_heads": 3}, "dim 64 over n_heads 3"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    assert message in replace(OLMO3, **changes).violations()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0: must be"),
        ({"sliding_window": "13"}, 'sliding_window = "13": must be an integer'),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ({"layer_types": 4}, "layer_types = 4"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters: full_attention = 3"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": [1]}}, "sliding_attention"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}}},
            "the theta of full layers",
        ),
    ],
)
def test_unsupported_hub_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        format_of(MODELS["olmo3"]).from_config(format_of(MODELS["olmo3"]).to_config(OLMO3) | changes)


def test_unknown_types_of_layers_are_named():
    with pytest.raises(ConfigError, match=r"layer_types = \"local\": must be \"full\" \| \"window\""):
        overlay(OLMO3, {"layer_types": ["full", "local"]}, where="model.args")
