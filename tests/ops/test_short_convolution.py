"""Tests of ops/short_convolution.py: it equals a sum of shifted tokens in fp64, within documents."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.dense_attention import distance
from torchtitan_clone.ops.attention import document_starts
from torchtitan_clone.ops.short_convolution import short_convolution

W = 4


def plain(x, weight, starts, before):
    """Returns the same as short_convolution() from one sum over all tokens."""
    T = x.shape[1]
    padded = torch.cat((before, x), dim=1)
    counts = [(starts <= torch.arange(T) - (W - 1 - index))[..., None] for index in range(W)]
    return F.silu(sum(padded[:, index : index + T] * counts[index] * weight[:, index] for index in range(W)))


def results(function, x, weight, starts, before):
    leaves = [y.detach().clone().requires_grad_() for y in (x, weight, before)]
    out = function(leaves[0], leaves[1], starts, leaves[2])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("T", "channels"), [(1, 6), (3, 6), (50, 6), (300, 1024)])  # the last in three blocks
def test_it_equals_a_sum_of_shifted_tokens(T, channels, share):
    torch.manual_seed(0)
    x, weight, before = torch.randn(2, T, channels), torch.randn(channels, W), torch.randn(2, W - 1, channels)
    starts = document_starts((torch.rand(2, T) < share).int().cumsum(1))
    starts = torch.where(starts == 0, -2, starts)  # which sees two of the tokens before
    right = results(plain, x.double(), weight.double(), starts, before.double())
    for got, expected in zip(results(short_convolution, x, weight, starts, before), right, strict=True):
        assert (got - expected).abs().max() < 1e-6 * expected.abs().max().clamp_min(1.0)


def test_without_documents_it_is_torch_s_convolution():
    x, weight = torch.randn(2, 20, 6), torch.randn(6, W)
    right = F.silu(F.conv1d(x.mT, weight[:, None], padding=W - 1, groups=6)[..., :20]).mT
    torch.testing.assert_close(short_convolution(x, weight), right)


def test_bfloat16_is_rounded_once():
    x, weight = torch.randn(2, 20, 6).bfloat16(), torch.randn(6, W).bfloat16()
    assert torch.equal(short_convolution(x, weight), short_convolution(x.float(), weight.float()).bfloat16())
    exact = results(short_convolution, x.float(), weight.float(), None, torch.zeros(2, W - 1, 6))
    rounded = results(short_convolution, x, weight, None, torch.zeros(2, W - 1, 6).bfloat16())
    assert max(map(distance, rounded, exact)) < 5e-3


def test_operators_are_right_for_tracing():
    x, weight = torch.randn(2, 20, 6, requires_grad=True), torch.randn(6, W, requires_grad=True)
    starts = document_starts((torch.rand(2, 20) < 0.2).int().cumsum(1))
    before = torch.randn(2, W - 1, 6, requires_grad=True)
    torch.library.opcheck(short_convolution, (x, weight, starts, before))
    torch.library.opcheck(short_convolution, (x, weight))
