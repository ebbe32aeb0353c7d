"""Attention in blocks: equal to dense attention on the CPU and with CUDA's kernels, in blocks of limited size."""

import pytest
import torch

from tests.ops.context_ranks import attention_of_all_ranks
from tests.ops.dense_attention import dense, distance, inputs, result_and_gradients
from torchtitan_clone.ops import blockwise_attention as blockwise
from torchtitan_clone.ops.attention import document_starts, visible_starts
from torchtitan_clone.ops.blockwise_attention import BLOCKWISE, document_attention


@pytest.mark.parametrize(("T", "document_length"), [(64, 20), (700, 30), (700, 500), (2500, 5000)])
def test_attention_in_blocks_equals_dense_attention(T, document_length):
    q, k, v, grad, documents = inputs(T, document_length=document_length)
    starts = document_starts(documents)
    got = result_and_gradients(lambda *x: document_attention(*x, starts)[0], q, k, v, grad)
    expected = result_and_gradients(lambda *x: dense(*x, documents), q, k, v, grad)
    assert max(map(distance, got, expected)) < 1e-6


REACHES = (
    {},
    {"window": 1},
    {"window": 100},
    {"window": 5000},
    {"chunk": 1},
    {"chunk": 300},
    {"window": 50, "chunk": 80},
)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("document_length", [None, 30, 400])
def test_windows_chunks_and_sinks_equal_dense_attention(document_length, reach):
    *qkv, grad, documents = inputs(600, document_length=document_length)
    sinks = torch.randn(8)
    starts = visible_starts(documents, like=qkv[0][..., 0, 0], **{"window": None, "chunk": None, **reach})
    starts = torch.zeros(2, 600, dtype=torch.int32) if starts is None else starts
    assert bool((starts.diff(dim=1) >= 0).all())  # which blocks rely on
    for extra in ([], [sinks]):
        got = result_and_gradients(lambda q, k, v, *s: document_attention(q, k, v, starts, *s)[0], *qkv, *extra, grad)
        right = result_and_gradients(lambda q, k, v, *s: dense(q, k, v, documents, *s, **reach), *qkv, *extra, grad)
        assert (got[0] - right[0]).abs().max() < 2e-6
        assert max(map(distance, got, right)) < 1e-6


def test_attention_in_blocks_rounds_like_dense_attention_in_bf16():
    q, k, v, grad, documents = inputs(1500, document_length=400)
    starts = document_starts(documents)
    exact = result_and_gradients(lambda *x: dense(*x, documents), q, k, v, grad)
    q, k, v, grad = (x.bfloat16() for x in (q, k, v, grad))
    got = result_and_gradients(lambda *x: document_attention(*x, starts)[0], q, k, v, grad)
    dense_in_bf16 = result_and_gradients(lambda *x: dense(*x, documents), q, k, v, grad)
    for blocked, usual, right in zip(got, dense_in_bf16, exact, strict=True):
        assert distance(blocked, right) < 1.1 * distance(usual, right)


def test_blocks_of_a_long_row_have_a_limited_size():
    """No mask has the size of all scores: the largest mask of a long row is that of one block."""
    documents = torch.zeros(1, 1 << 16, dtype=torch.int32)
    like, row = torch.empty(1, 1), (range(1 << 16),)
    largest_queries, largest_keys = blockwise._BLOCK_SIZES["cpu"]
    blocks = list(blockwise.key_blocks(row, row, document_starts(documents), like=like))
    assert max(len(block.queries.index) for block in blocks) == largest_queries
    assert max(len(block.index) for block in blocks) == largest_keys
    masked = sum(not (block.is_full or block.is_triangle) for block in blocks)
    assert masked <= 2 * (1 << 16) / largest_queries


@pytest.mark.parametrize("limits", [{"window": 128}, {"chunk": 1024}], ids=str)
def test_windows_and_chunks_visit_few_keys_of_a_long_row(limits):
    """Work and memory grow with the length of the row, not with its square."""
    T = 1 << 16
    starts = visible_starts(None, like=torch.empty(1, T), **{"window": None, "chunk": None, **limits})
    blocks = list(blockwise.key_blocks((range(T),), (range(T),), starts, like=torch.empty(1, 1)))
    largest_queries, _ = blockwise._BLOCK_SIZES["cpu"]
    assert max(len(block.index) for block in blocks) <= max(limits.values()) + largest_queries
    scores = sum(len(block.index) * len(block.queries.index) for block in blocks)
    assert scores <= T * (max(limits.values()) + largest_queries)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.parametrize(("T", "degree"), [(64, 2), (840, 4), (6000, 1)])
@pytest.mark.parametrize("document_length", [None, 50, 3000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_of_cuda_equal_dense_attention(T, degree, document_length, dtype, tolerance):
    q, k, v, grad, documents = inputs(T, document_length=document_length)
    exact = result_and_gradients(lambda *x: dense(*x, documents), *(x.double() for x in (q, k, v, grad)))
    on_gpu = (x.to(dtype).cuda() for x in (q, k, v, grad))
    found = attention_of_all_ranks(*on_gpu, documents, degree=degree, kernel=BLOCKWISE)
    assert max(distance(tensor.cpu(), right) for tensor, right in zip(found, exact, strict=True)) < tolerance
