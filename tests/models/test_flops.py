"""Tests of spec.py: FLOPs per token of the families, also of runs that freeze blocks."""

from dataclasses import replace

import pytest

from torchtitan_clone.models import MODELS


def test_flops_count_heads_of_their_own_size():
    """Counts 6 for each parameter in a product, and 12 x layers x heads x head dim x tokens for attention."""
    spec = MODELS["qwen3"]
    changes = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 96}
    args = replace(spec.flavors["debugmodel"], vocab_size=97, **changes)
    parameters = spec.state_on_meta(args)
    size = sum(p.numel() for p in parameters.values()) - (not args.tied_embeddings) * 97 * 64
    flops = spec.flops_per_token(args, parameters=parameters, seq_len=128, frozen_layers=0)
    assert flops == 6 * size + 12 * 3 * 4 * 32 * 128


@pytest.mark.parametrize("frozen_layers", [1, 3])
def test_flops_of_frozen_blocks_are_a_third(frozen_layers):
    spec = MODELS["llama3"]
    changes = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 192, "vocab_size": 2048}
    args = replace(spec.flavors["debugmodel"], **changes)
    parameters = spec.state_on_meta(args)
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
    attention = 64 * 64  # of all heads, with each of 64 tokens
    unfrozen = 6 * (4 * block + 2049 * 64) + 12 * 4 * attention
    assert spec.flops_per_token(args, parameters=parameters, seq_len=64, frozen_layers=0) == unfrozen
    expected = unfrozen - frozen_layers * (4 * block + 8 * attention)
    assert spec.flops_per_token(args, parameters=parameters, seq_len=64, frozen_layers=frozen_layers) == pytest.approx(
        expected
    )
