"""Attention with a mask of all pairs of tokens, which other implementations are compared with."""

import torch
import torch.nn.functional as F


def dense(q, k, v, documents, sinks=None, *, window=None, chunk=None):
    """Returns attention with a mask of all pairs of tokens; chunks are those of each document."""
    T = q.shape[1]
    index = torch.arange(T)
    documents = torch.zeros(1, T, dtype=torch.int32) if documents is None else documents
    sees = (index <= index[:, None]) & (documents[:, :, None] == documents[:, None, :])
    if window is not None:
        sees = sees & (index[:, None] - index < window)
    if chunk is not None:
        lengths = [row.unique_consecutive(return_counts=True)[1] for row in documents]
        chunks = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]) // chunk
        sees = sees & (chunks[:, :, None] == chunks[:, None, :])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees[:, None], enable_gqa=True).transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~sees[:, None], -torch.inf)
    logits = torch.cat((logits, sinks[:, None, None].expand(*logits.shape[:3], 1)), dim=-1)
    return (logits.softmax(-1)[..., :-1] @ v).transpose(1, 2)


def inputs(T, *, document_length, dtype=torch.float32):
    """Returns queries, keys and values with grouped heads, a gradient of the result, and documents."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, T, heads, 16).to(dtype) for heads in (8, 4, 4, 8))
    documents = (torch.rand(2, T) < 1 / document_length).cumsum(1).int() if document_length else None
    return q, k, v, grad, documents


def result_and_gradients(attention, *tensors):
    """Returns the result of attention, and the gradients by q, k, v and other inputs; the last tensor is its own."""
    *inputs, grad = tensors
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def distance(got, expected):
    """Returns the norm of the difference over the norm; infinity for NaN."""
    found = (got.double() - expected.double()).norm() / expected.double().norm()
    return found.nan_to_num(nan=torch.inf).item()


def assert_bits_do_not_depend_on_threads_or_on_neighbours(attention, *tensors):
    """Compares the results for both rows with those for the second one alone, on one thread."""
    threads = torch.get_num_threads()
    both = attention(*tensors)
    try:
        torch.set_num_threads(1)
        alone = attention(*(x[1:] for x in tensors))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x[1:], y) for x, y in zip(both, alone, strict=True))
