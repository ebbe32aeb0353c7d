"""Tests of spec.py: FLOPs per token of the families, also of runs that freeze blocks, and the costs of layers."""

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


def test_flops_do_not_count_learned_positions():
    spec = MODELS["gpt2"]
    few, many = (replace(spec.flavors["debugmodel"], max_seq_len=count) for count in (128, 4096))
    found = [
        spec.flops_per_token(args, parameters=spec.state_on_meta(args), seq_len=128, frozen_layers=0)
        for args in (few, many)
    ]
    assert found[0] == found[1]


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


@pytest.mark.parametrize("name", ["llama3", "qwen3", "olmo2", "qwen3_moe"])
def test_layers_of_one_kind_have_equal_costs(name):
    args = MODELS[name].flavors["debugmodel"]
    assert MODELS[name].layer_costs(args, seq_len=4096) == [100] * args.n_layers


def test_layers_cost_what_processes_a_token():
    """Counts the router, 2 of 8 experts and a shared one where a layer has them, and the norms."""
    spec = MODELS["deepseek_v3"]
    changes = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_dense_layers": 1, "hidden_dim": 1024, "q_lora_rank": 0}
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    args = replace(spec.flavors["debugmodel"], **changes, **sizes)
    args = replace(args, moe=replace(args.moe, hidden_dim=32))
    attention = 64 * 4 * 24 + 64 * (32 + 8) + 32 + 32 * 4 * 32 + 4 * 16 * 64 + 4 * 20 * 128 * 2 + 2 * 64
    dense, experts = attention + 3 * 64 * 1024, attention + 3 * (3 * 64 * 32) + 8 * 64
    assert spec.layer_costs(args, seq_len=128) == [round(100 * dense / experts), 100, 100]


def test_windows_cost_at_most_the_window():
    spec = MODELS["gpt_oss"]
    args = replace(spec.flavors["20b"], n_layers=2)
    attention = 2880 * 64 * 64 * 2 + 2880 * 8 * 64 * 2 + 64 * 64 + 2 * 8 * 64 + 2880 + 64
    size = attention + 32 * 2881 + 4 * (3 * 2880 * 2880 + 3 * 2880) + 2 * 2880
    window, full = size + 2 * 64 * 64 * 128, size + 2 * 64 * 64 * 8192
    assert spec.layer_costs(args, seq_len=8192) == [100, round(100 * full / window)]
    assert spec.layer_costs(args, seq_len=128) == [100, 100]
