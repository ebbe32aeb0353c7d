"""Tests of kv_cache.py: the same tokens as transformers, with and without a cache."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import (
    test_families,
    test_gpt_oss,
    test_kimi_linear,
    test_llama4,
    test_olmo3,
    test_olmo_hybrid,
    test_qwen3_5,
)
from tests.support.twins import twin_of
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.qwen3.model import Qwen3Args, Qwen3MoEArgs
from torchtitan_clone.tools.generation import Generator, Sampling
from torchtitan_clone.tools.trained_model import TrainedModel

VOCABULARY = 97
SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": 256}
HEADS = {"n_kv_heads": 2, "head_dim": 32, "hidden_dim": 96}
DEEPSEEK = MODELS["deepseek_v3"].flavors["debugmodel"]
FAMILIES = {
    "llama3": Llama3Args(**SIZES, n_kv_heads=2),
    "qwen3": Qwen3Args(**SIZES, **HEADS),
    "qwen3_moe": Qwen3MoEArgs(**SIZES, **HEADS, moe=MoEArgs(num_experts=8, top_k=2, hidden_dim=24)),
    "qwen3_5": test_qwen3_5.ARGS,
    "qwen3_5_moe": test_qwen3_5.MOE_ARGS,
    "qwen3_next": test_qwen3_5.MOE_ARGS,
    "kimi_linear": test_kimi_linear.ARGS,
    "olmo_hybrid": test_olmo_hybrid.ARGS,
    "olmo2": test_olmo3.VARIANTS["olmo2"][1],
    "olmo3": test_olmo3.OLMO3,
    "gpt_oss": test_gpt_oss.ARGS,
    "llama4": test_llama4.ARGS,
    "deepseek_v3": replace(
        DEEPSEEK, **SIZES | {"n_layers": 3}, hidden_dim=96, moe=replace(DEEPSEEK.moe, hidden_dim=24)
    ),
    **test_families.SMALL,
}
NEW_TOKENS = 64


def build(name, *, args=None):
    """Returns a model of the family with random weights, whose norms and biases are not ones and zeros."""
    torch.manual_seed(1)
    model = MODELS[name].build(args or FAMILIES[name])
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        if "bias" in parameter_name or "sinks" in parameter_name:
            torch.nn.init.normal_(parameter)
    return model.requires_grad_(False)


def generator_of(name, *, use_cache, **sampling):
    # No token is the end of a document: the last one is left out of the prompts, and is not the most likely one.
    tokenizer = replace(build_tokenizer(None), vocab_size=VOCABULARY, eos_id=VOCABULARY, end_ids=(VOCABULARY,))
    trained = TrainedModel(
        path=Path(), model=build(name), args=FAMILIES[name], tokenizer=tokenizer, device=torch.device("cpu")
    )
    return Generator(trained, sampling=Sampling(max_new_tokens=NEW_TOKENS, **sampling), use_cache=use_cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name):
    """Prompts of unequal length in one batch, longer than windows and chunks, with and without a cache."""
    torch.manual_seed(0)
    prompts = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in (5, 23)]
    twin = twin_of(MODELS[name], build(name), FAMILIES[name])
    twin.generation_config.eos_token_id = None
    long = torch.tensor(prompts[1:])
    expected = twin.generate(long, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0, 23:].tolist()
    cached = generator_of(name, use_cache=True)
    short_ids, long_ids = cached.complete(prompts)
    # Each token is the most likely one after those before it.
    logits_TV = twin(torch.tensor([prompts[0] + short_ids]), use_cache=False).logits[0, 4:-1]
    assert short_ids == logits_TV.argmax(-1).tolist()
    # The same cache again, of a batch without padding; and no cache.
    both = cached, generator_of(name, use_cache=False)
    alone = [ids for generator in both for ids in generator.complete(prompts[1:])]
    assert [long_ids, *alone] == [expected] * 3
    assert len(short_ids) == len(long_ids) == NEW_TOKENS


def test_every_family_is_compared():
    assert FAMILIES.keys() == MODELS.keys()
