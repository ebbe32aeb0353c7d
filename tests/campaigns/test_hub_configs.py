"""Configurations of releases, with equal logits or refused by name: a part of tests/campaigns/hub_configs.py."""

import pytest

from tests.campaigns.hub_configs import BASES, RELEASES, mutations, outcome, silence, without_effect

REFUSED = {
    "llama smollm": "rope_interleaved = False: llama3 has no such key",
    "llama vicuna long": 'type = "dynamic"',
    "llama mistral window": "sliding_window = 8",
    "llama partial rotary": "partial_rotary_factor = 0.5",
    "llama partial rotary inside": "partial_rotary_factor = 0.5",
    "llama mscale": "mscale_all_dim = 1.0",
    "llama bidirectional": "is_causal = False",
    "llama softcapping": "final_logit_softcapping = 30.0",
    "llama multipliers": "embedding_multiplier = 12.0",
    "llama dropout": "attention_dropout = 0.1",
    "llama gptq": "quantization_config = 'gptq'",
    "olmo2 clip": "clip_qkv = 8.0",
    "olmo3 other theta": "sliding_attention",
    "deepseek V3, llama3 mscale": "mscale_all_dim = 1.0",
    "gpt_oss experts": "experts_per_token = 2",
}
EQUAL = (
    "llama 2 7B", "llama 3.2 1B", "llama two original lengths", "llama one original length", "llama yarn",
    "qwen2.5 7B", "mistral 7B", "qwen3 0.6B", "qwen3 8B, yarn", "qwen3_moe not normalized", "olmo2 32B", "olmo3 32B",
    "olmo3 of transformers 5",
    "deepseek V2", "deepseek V3", "deepseek moonlight", "llama4 scout", "llama4 no tuning", "gpt_oss 20b",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    silence()


@pytest.mark.parametrize("name", EQUAL)
def test_a_release_has_the_logits_of_transformers(name):
    found, why = outcome(RELEASES[name])
    assert found == "equal", why


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_that_is_not_supported_is_refused_by_name(name):
    found, why = outcome(RELEASES[name])
    assert (found, REFUSED[name] in why) == ("refused", True), why


@pytest.mark.parametrize("family", BASES)
def test_keys_that_are_said_to_have_no_effect_have_none(family):
    for text, config in without_effect(BASES[family]):
        found, why = outcome(config)
        assert found == "equal", f"{text}: {why}"


def test_mutations_change_one_key():
    base = BASES["llama"]
    found = dict(mutations(base))
    assert "rope_theta" not in found["rope_theta = absent"]
    assert found["is_causal = None"] == {**base, "is_causal": None}
    assert {text for text in found if text.startswith("attention_dropout")} >= {"attention_dropout = None"}
