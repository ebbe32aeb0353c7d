"""Tests of llama3/model.py and rope.py against transformers' Llama with the same weights."""

from dataclasses import replace

import pytest
import torch

from tests.models.twins import assert_logits_equal, assert_round_trip
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.rope import RopeScaling

ARGS = Llama3Args(dim=64, n_layers=3, n_heads=4, vocab_size=97, multiple_of=16, rope_theta=10000.0, max_seq_len=256)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "tied_embeddings": True},
        {"rope_scaling": RopeScaling(factor=8.0, original_max_seq_len=64), "n_kv_heads": 2},
    ],
    ids=["multi-head", "grouped", "tied", "rope scaling"],
)
def test_logits_equal_hugging_face(changes):
    assert_logits_equal(MODELS["llama3"], replace(ARGS, **changes))


def test_weights_of_transformers_return_unchanged():
    assert_round_trip(MODELS["llama3"], ARGS)


def test_published_sizes():
    published = {"1B": 1_235_814_400, "3B": 3_212_749_824, "8B": 8_030_261_248, "70B": 70_553_706_496}
    published["405B"] = 405_853_388_800
    spec = MODELS["llama3"]
    for flavor, size in published.items():
        with torch.device("meta"):
            model = spec.build(spec.flavors[flavor])
        assert sum(p.numel() for p in model.parameters()) == size, flavor


def test_bad_arguments_are_named():
    assert replace(ARGS, n_kv_heads=2).violations() == []
    assert "n_kv_heads 3 does not divide n_heads 4" in replace(ARGS, n_kv_heads=3).violations()[0]
    assert "dim 64 over n_heads 5" in replace(ARGS, n_heads=5).violations()[0]
    assert "n_layers = 0" in replace(ARGS, n_layers=0).violations()[0]
