"""Attention over short rows in bfloat16: torch's results, and gradients that round as those of bfloat16 do."""

import pytest
import torch

from tests.ops.dense_attention import dense, distance, inputs, result_and_gradients
from torchtitan_clone.models.attention import CoreAttention
from torchtitan_clone.ops import short_rows
from torchtitan_clone.ops.short_rows import causal_attention, takes_short_rows
from torchtitan_clone.torch_compat import HAS_AMX, cpu_flash_attention, fake_tensors


def low_inputs(T):
    *tensors, _ = inputs(T, document_length=None)
    return [x.bfloat16() for x in tensors]


def products_one_by_one(q, k, v):
    """Returns causal attention whose scores and probabilities are in bfloat16."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)


@pytest.mark.parametrize("scores", [2**21, 256 * 300, 1], ids=["all heads", "a head", "less"])
@pytest.mark.parametrize("T", [2, 17, 256, 300])
def test_gradients_round_like_those_of_products_in_bf16(T, scores, monkeypatch):
    monkeypatch.setattr(short_rows, "_SCORES", scores)
    q, k, v, grad = low_inputs(T)
    exact = result_and_gradients(lambda *x: dense(*x, None), *(x.double() for x in (q, k, v, grad)))
    got = result_and_gradients(causal_attention, q, k, v, grad)
    usual = result_and_gradients(products_one_by_one, q, k, v, grad)
    for found, other, right in zip(got, usual, exact, strict=True):
        assert found.is_contiguous()
        assert distance(found, right) <= 1.1 * distance(other, right)


def test_results_are_those_of_torch():
    q, k, v, _ = low_inputs(300)
    expected, _ = cpu_flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    assert torch.equal(causal_attention(q, k, v), expected.transpose(1, 2))


def test_the_operator_can_be_compiled():
    *qkv, grad = low_inputs(40)
    torch.library.opcheck(causal_attention, [x.requires_grad_() for x in qkv])
    compiled = torch.compile(causal_attention, backend="aot_eager", fullgraph=True)
    got = result_and_gradients(compiled, *qkv, grad)
    assert all(map(torch.equal, got, result_and_gradients(causal_attention, *qkv, grad)))


@pytest.mark.parametrize("has_amx", [True, False])
def test_it_is_used_for_short_rows_in_bf16_where_it_is_faster(has_amx, monkeypatch):
    monkeypatch.setattr(short_rows, "HAS_AMX", has_amx)
    q, k, v, _ = low_inputs(768)

    def backward_of(*tensors):
        return type(CoreAttention()(*(x.requires_grad_() for x in tensors), None).grad_fn).__name__

    of_short = {backward_of(*(x[:, :767].detach() for x in (q, k, v)))}
    others = {backward_of(q, k, v), backward_of(*(x[:, :100].detach().float() for x in (q, k, v)))}
    assert (of_short == others) is not has_amx
    assert len(others) == 1
    with fake_tensors():
        assert not takes_short_rows(torch.empty(1, 8, 1, 16, dtype=torch.bfloat16))


def test_amx_is_found():
    with open("/proc/cpuinfo") as file:
        assert ("amx_tile" in file.read()) == HAS_AMX
