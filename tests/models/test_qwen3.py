"""Tests of qwen3/model.py against transformers' Qwen3 with the same weights."""

from dataclasses import replace

import pytest

from tests.models.twins import assert_logits_equal, assert_round_trip
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.qwen3.model import Qwen3Args

SPEC = MODELS["qwen3"]
ARGS = Qwen3Args(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, vocab_size=97)


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_kv_heads": 4}, {"n_kv_heads": 1, "tied_embeddings": True}, {"rope_theta": 1e4, "norm_eps": 1e-5}],
    ids=["grouped", "multi-head", "tied", "theta and eps"],
)
def test_logits_equal_transformers(changes):
    assert_logits_equal(SPEC, replace(ARGS, **changes))


def test_weights_of_transformers_return_unchanged():
    assert_round_trip(SPEC, ARGS)


def test_published_sizes():
    """Parameters as the releases count them; a tied embedding counts once."""
    published = {
        "0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360,
        "14B": 14_768_307_200, "32B": 32_762_123_264,
    }  # fmt: skip
    for flavor, size in published.items():
        args = SPEC.flavors[flavor]
        assert sum(tensor.numel() for tensor in SPEC.state_on_meta(args).values()) == size, flavor
        assert args.violations() == []


def test_norms_of_queries_and_keys_start_at_one():
    stds = {name: SPEC.initial_std(ARGS, name) for name in SPEC.state_on_meta(ARGS)}
    assert stds["layers.0.attention.q_norm.weight"] is None
    assert stds["layers.0.attention.k_norm.weight"] is None
    assert stds["layers.0.attention.wq.weight"] == 0.02


def test_bad_arguments_are_named():
    assert ARGS.violations() == []
    assert "n_kv_heads 3 does not divide n_heads 4" in replace(ARGS, n_kv_heads=3).violations()[0]
    assert "head_dim = 31 must be even" in replace(ARGS, head_dim=31).violations()[0]
    assert "hidden_dim = 0" in replace(ARGS, hidden_dim=0).violations()[0]
