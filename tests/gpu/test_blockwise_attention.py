"""Attention in blocks with CUDA's kernels, as context parallelism calls them; all ranks' parts on one device."""

import pytest
import torch

from tests.parallel.test_context import dense, distance, inputs, result_and_gradients
from torchtitan_clone.ops.blockwise_attention import (
    Gradients,
    attend_,
    attend_backward_,
    document_starts,
    empty_attention,
)
from torchtitan_clone.parallel.context import local_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def in_parts(q, k, v, grad, documents, *, degree):
    """Result and gradients of all ranks one after another."""
    ranks = [local_tokens(q.shape[1], rank=rank, degree=degree, method="ring") for rank in range(degree)]
    places = [torch.cat([torch.arange(p.start, p.stop) for p in pieces]).to(q.device) for pieces in ranks]
    total_out, gradients = torch.zeros_like(q), Gradients.zeros(q, k)
    for pieces, mine in zip(ranks, places, strict=True):
        starts = None if documents is None else document_starts(documents)[:, mine]
        out, lse = empty_attention(q[:, mine])
        sources = [
            (keys, (q[:, mine], k[:, theirs], v[:, theirs]), theirs) for keys, theirs in zip(ranks, places, strict=True)
        ]
        for keys, qkv, _ in sources:
            attend_((out, lse), qkv, queries=pieces, keys=keys, starts_BT=starts)
        total_out[:, mine] = out.to(q.dtype)
        for keys, qkv, theirs in sources:
            part = Gradients.zeros(*qkv[:2])
            attend_backward_(
                part, grad[:, mine], qkv, (out.to(q.dtype), lse), queries=pieces, keys=keys, starts_BT=starts
            )  # fmt: skip
            for total, more, place in zip(gradients, part, (mine, theirs, theirs), strict=True):
                total[:, place] += more
    return [total_out, *gradients]


@pytest.mark.parametrize(("T", "degree"), [(64, 2), (840, 4), (6000, 1)])
@pytest.mark.parametrize("document_length", [None, 50, 3000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_blocks_equal_dense_attention(T, degree, document_length, dtype, tolerance):
    q, k, v, grad, documents = inputs(T, document_length=document_length)
    exact = result_and_gradients(lambda *x: dense(*x, documents), *(x.double() for x in (q, k, v, grad)))
    on_gpu = (
        None if x is None else x.cuda() for x in (q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype), documents)
    )
    found = in_parts(*on_gpu, degree=degree)
    assert max(distance(part.cpu(), right) for part, right in zip(found, exact, strict=True)) < tolerance
