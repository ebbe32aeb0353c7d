"""Rows of projections are scaled so that logits of each head are multiplied by its factor."""

from dataclasses import replace

import pytest
import torch

from torchtitan_clone.models import MODELS
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.mla import LatentAttention, LatentSizes
from torchtitan_clone.models.qk_clip import find_unclippable, row_factors
from torchtitan_clone.models.rope import RopeArgs, Rotary

HEADS, KV_HEADS, DIM, T = 6, 2, 48, 10
FACTORS = torch.tensor([1.0, 0.5, 0.9, 0.25, 1.0, 0.1], dtype=torch.float64)
SIZES = LatentSizes(q_latent=24, kv_latent=16, nope=8, rope=4, value=12)
ATTENTIONS = {
    "grouped": lambda: Attention(dim=DIM, n_heads=HEADS, kv_heads=KV_HEADS, head_dim=8),
    "grouped, with biases": lambda: Attention(dim=DIM, n_heads=HEADS, kv_heads=KV_HEADS, head_dim=8, bias=True),
    "multi-head": lambda: Attention(dim=DIM, n_heads=HEADS, kv_heads=HEADS, head_dim=8),
    "latent": lambda: LatentAttention(SIZES, dim=DIM, n_heads=HEADS, score_scale=1.3),
    "latent, without query latent": lambda: LatentAttention(replace(SIZES, q_latent=0), dim=DIM, n_heads=HEADS),
}


def logits_and_values(attention):
    """Returns the logits [N, T, T] of all heads, and the values."""
    torch.manual_seed(1)
    rotary = Rotary(RopeArgs(dim=4 if isinstance(attention, LatentAttention) else 8, theta=10000.0, scaling=None))
    rotary.init_buffers()
    seen = []
    attention.core.register_forward_pre_hook(lambda _, args: seen.append(args))
    attention(torch.randn(1, T, DIM).double(), rotary(torch.arange(T)[None]), None)
    q, k, v, *_ = seen[0]
    k = k.repeat_interleave(HEADS // k.shape[2], dim=2)
    return torch.einsum("btnh,bsnh->nts", q, k), v


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_logits_are_multiplied_by_the_factor_of_their_head(kind, alpha):
    torch.manual_seed(0)
    attention = ATTENTIONS[kind]().double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
        before, values = logits_and_values(attention)
        kv_heads = HEADS if kind == "multi-head" else KV_HEADS
        for name, factor_R in row_factors(attention, FACTORS, kv_heads=kv_heads, alpha=alpha).items():
            for parameter in getattr(attention, name).parameters():
                parameter *= factor_R.view(-1, *[1] * (parameter.ndim - 1))
        after, same = logits_and_values(attention)
    torch.testing.assert_close(after, before * FACTORS[:, None, None], rtol=1e-12, atol=1e-9)
    assert torch.equal(values, same)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama3", {}, None),
        ("gpt_oss", {}, None),
        ("deepseek_v3", {}, None),
        ("qwen3", {}, "layers.0.attention normalizes queries and keys"),
        ("olmo3", {}, "layers.0.attention normalizes queries and keys"),
        ("llama4", {}, "layers.0.attention normalizes queries and keys"),
        ("llama4", {"qk_norm": False}, None),
    ],
)
def test_a_norm_of_queries_is_a_reason_not_to_clip(family, changes, expected):
    spec = MODELS[family]
    with torch.device("meta"):
        model = spec.build(replace(spec.flavors["debugmodel"], **changes))
    found = list(find_unclippable(model))
    assert [message.partition(",")[0] for message in found] == ([] if expected is None else [expected])


def test_attention_of_another_kind_is_named():
    class Other(torch.nn.Module):
        def __init__(self, core):
            super().__init__()
            self.core = core

    model = torch.nn.Module()
    model.attention = Other(ATTENTIONS["latent"]().core)
    assert list(find_unclippable(model)) == ["attention is Other, of which it knows no weights of queries"]
    assert list(find_unclippable(torch.nn.Linear(2, 2))) == ["the model has no attention with logits"]
