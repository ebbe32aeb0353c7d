"""Exact attention by torch's kernels, in blocks of queries and keys: causal, and within documents.

Results of blocks are merged through the logarithm of the sum of exponentials (lse).
Legend: B batch, T queries, S keys, N heads, K kv heads, H head dim; t and s queries and keys of one block.
Source: arXiv 2205.14135.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from torchtitan_clone import torch_compat
from torchtitan_clone.ops import varlen_attention as varlen
from torchtitan_clone.ops.varlen_attention import (
    QKV,
    Attention,
    Queries,
    Segments,
    Spans,
    copied,
    placed,
    supports_flash_attention,
)

# Maximum queries and keys of a block. On CPU fewer queries waste less work on masked keys.
_BLOCK_SIZES = {"cpu": (256, 2048), "cuda": (2048, 2048)}
_HIDDEN = -1e30  # score of masked keys; not -inf, which gives NaN where all keys of a block are masked


@dataclass(frozen=True, kw_only=True)
class _QueryBlock:
    """Queries of some rows: none attends to keys before `sees_from`, all of them to those from `all_see_from` on."""

    rows: slice
    index: range  # in the row
    place: slice  # in memory
    sees_from: int
    all_see_from: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of queries with keys to which some of them attend."""

    queries: _QueryBlock
    index: range
    place: slice

    @property
    def is_full(self) -> bool:
        return self.index.start >= self.queries.all_see_from and self.index.stop <= self.queries.index.start + 1

    @property
    def is_triangle(self) -> bool:
        """Whether queries and keys are the same tokens, all of one document."""
        return self.index.start >= self.queries.all_see_from and self.index == self.queries.index


def empty_attention(q_BTNH: Tensor, sinks_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns attention over no keys, to add others to: out [B, T, N, H] and lse [B, T, N], fp32.

    A sink is a logit of a head that takes part in the softmax, and whose value is zero. Source: arXiv 2309.17453.
    """
    out_BTNH = torch.zeros_like(q_BTNH, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse_BTN = torch.full(q_BTNH.shape[:3], -torch.inf, device=q_BTNH.device)
    return out_BTNH, lse_BTN if sinks_N is None else lse_BTN.copy_(sinks_N.expand_as(lse_BTN))


def sink_gradients(grad_BTNH: Tensor, attention: Attention, sinks_N: Tensor) -> Tensor:
    """Returns the gradient with respect to sinks [N]; `attention` is (out, lse) over all keys and the sinks."""
    out_BTNH, lse_BTN = attention
    share_BTN = (sinks_N.float() - lse_BTN).exp()
    grad_N = -(share_BTN * (grad_BTNH.float() * out_BTNH.float()).sum(-1)).sum((0, 1))
    return grad_N.to(sinks_N.dtype)


class BlockwiseAttention:
    """Attention over some keys after others by torch's kernels: ops.attention.PartialKernel.

    Where FlashAttention takes these queries, it computes those that attend to keys of their own segments in one call.
    """

    takes_whole_rows = False

    def __init__(self, *, uses_segments: Callable[[Tensor], bool] = supports_flash_attention) -> None:
        self._uses_segments = uses_segments

    def attend(self, qkv: QKV, *, queries: Queries, keys: Spans, merge_into: Attention | None) -> Attention:
        """Returns attention over these keys, after it was merged into that over others, in place."""
        out_BTNH, lse_BTN = merge_into or empty_attention(qkv[0])
        segments = self._segments(qkv[0], queries)
        if segments is not None and list(keys) == list(queries.spans):
            merge_(out_BTNH, lse_BTN, *varlen.attend_within(qkv, segments))
        for block, bias in _biased_blocks(queries, keys, segments, like=qkv[0]):
            q_BNtH, k_BKsH, v_BKsH = _cut(block, qkv)
            out_BNtH, lse_BNt = _forward(q_BNtH, k_BKsH, v_BKsH, bias=bias, causal=block.is_triangle)
            place = block.queries.rows, block.queries.place
            merge_(out_BTNH[place], lse_BTN[place], out_BNtH.transpose(1, 2), lse_BNt.transpose(1, 2))
        return out_BTNH, lse_BTN

    def attend_backward(
        self, grad_BTNH: Tensor, qkv: QKV, attention: Attention, *, queries: Queries, keys: Spans,
        q_grad: Tensor | None, kv_grads: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Returns the gradient with respect to queries added to `q_grad`, and writes those to keys and values."""
        q_grad = torch.zeros_like(qkv[0], dtype=torch.float32) if q_grad is None else q_grad
        gradients = q_grad, *(gradient.zero_() for gradient in kv_grads)
        segments = self._segments(qkv[0], queries)
        if segments is not None and list(keys) == list(queries.spans):
            more = varlen.attend_within_backward(grad_BTNH, qkv, attention, segments)
            for total, gradient in zip(gradients, more, strict=True):
                total += gradient
        for block, bias in _biased_blocks(queries, keys, segments, like=qkv[0]):
            rows, place = block.queries.rows, block.queries.place
            q_BNtH, k_BKsH, v_BKsH = _cut(block, qkv)
            grad_BNtH, out_BNtH, lse_BNt = (x[rows, place].transpose(1, 2) for x in (grad_BTNH, *attention))
            tensors, causal = (grad_BNtH, q_BNtH, k_BKsH, v_BKsH, out_BNtH, lse_BNt), block.is_triangle
            places = (place, block.place, block.place)
            for total, gradient, where in zip(
                gradients, _backward(*tensors, bias=bias, causal=causal), places, strict=True
            ):
                total[rows, where] += gradient.transpose(1, 2)
        return q_grad

    def _segments(self, q_BTNH: Tensor, queries: Queries) -> Segments | None:
        return queries.segments if self._uses_segments(q_BTNH) else None


BLOCKWISE = BlockwiseAttention()


def merge_(out_BTNH: Tensor, lse_BTN: Tensor, more_BTNH: Tensor, more_lse_BTN: Tensor) -> None:
    """Adds attention over more keys in place."""
    lse = torch.logaddexp(lse_BTN, more_lse_BTN)
    out_BTNH.mul_((lse_BTN - lse).exp_()[..., None])
    out_BTNH.addcmul_(more_BTNH.float(), (more_lse_BTN - lse).exp_()[..., None])
    lse_BTN.copy_(lse)


def _cut(block: Block, qkv: QKV) -> list[Tensor]:
    """Returns the block's queries [B, N, t, H], keys and values [B, K, s, H]."""
    places = (block.queries.place, block.place, block.place)
    return [x[block.queries.rows, place].transpose(1, 2) for x, place in zip(qkv, places, strict=True)]


def _biased_blocks(
    queries: Queries, keys: Spans, segments: Segments | None, *, like: Tensor
) -> Iterator[tuple[Block, Tensor | None]]:
    """Yields all blocks that segments do not cover, each with what is added to its scores."""
    if torch_compat.is_fake(like) and like.device.type == "cpu":
        return  # a simulated run computes nothing
    if segments is not None:
        yield from ((block, None) for block in _earlier_blocks(queries.spans, keys, segments))
    else:
        starts_BT = queries.starts_BT
        on_device_BT = None if starts_BT is None else copied(starts_BT, like.device)
        blocks = key_blocks(queries.spans, keys, starts_BT, like=like)
        yield from ((block, _bias(block, on_device_BT, like=like)) for block in blocks)


def _earlier_blocks(queries: Spans, keys: Spans, segments: Segments) -> Iterator[Block]:
    """Yields the first segment of each span with all keys of an earlier span that it sees.

    keys     [ earlier span ]      [ span of the queries     ]
    document         ^------------- first segment --^
    """
    for offset, span in placed(queries):
        for rows, length, start in segments.first_of(offset):
            index, place = range(span.start, span.start + length), slice(offset, offset + length)
            block = _QueryBlock(rows=rows, index=index, place=place, sees_from=start, all_see_from=start)
            for key_offset, earlier in placed(keys):
                seen = range(max(earlier.start, start), earlier.stop)
                if earlier.stop <= span.start and seen:
                    yield Block(queries=block, index=seen, place=_shifted(seen, key_offset - earlier.start))


def key_blocks(queries: Spans, keys: Spans, starts_BT: Tensor | None, *, like: Tensor) -> Iterator[Block]:
    """Yields all blocks that are not fully masked, those of the same queries one after another."""
    most_queries, most_keys = _BLOCK_SIZES[like.device.type]
    # Rows have different masks, which matters only with more than one block of queries. Of several rows, CUDA's kernel
    # would copy queries, keys and masks.
    by_row = starts_BT is not None and (like.device.type == "cuda" or max(map(len, queries)) > most_queries)
    rows = [slice(row, row + 1) for row in range(len(like))] if by_row else [slice(0, len(like))]
    for block in _query_blocks(queries, starts_BT, rows=rows, most=most_queries):
        for offset, span in placed(keys):
            stop = min(span.stop, block.index.stop)
            for first in range(max(span.start, block.sees_from), stop, most_keys):
                index = range(first, min(first + most_keys, stop))
                yield Block(queries=block, index=index, place=_shifted(index, offset - span.start))


def _query_blocks(queries: Spans, starts_BT: Tensor | None, *, rows: list[slice], most: int) -> Iterator[_QueryBlock]:
    starts = None if starts_BT is None else starts_BT.tolist()
    for some in rows:
        for offset, span in placed(queries):
            for first in range(span.start, span.stop, most):
                index = range(first, min(first + most, span.stop))
                place = _shifted(index, offset - span.start)
                # Starts only grow along a row.
                sees_from = 0 if starts is None else min(row[place.start] for row in starts[some])
                all_see_from = 0 if starts is None else max(row[place.stop - 1] for row in starts[some])
                yield _QueryBlock(rows=some, index=index, place=place, sees_from=sees_from, all_see_from=all_see_from)


def _shifted(index: range, by: int) -> slice:
    return slice(index.start + by, index.stop + by)


def _bias(block: Block, starts_BT: Tensor | None, *, like: Tensor) -> Tensor | None:
    """Returns what is added to the scores [B or 1, 1, t, s]; None where every query attends to all earlier keys."""
    if block.is_full or block.is_triangle:
        return None
    q_t1 = torch.arange(block.queries.index.start, block.queries.index.stop, device=like.device)[:, None]
    # CUDA's kernel wants the rows of a bias aligned to 16 elements.
    aligned = block.index.start + -(-len(block.index) // 16) * 16
    k_s = torch.arange(block.index.start, aligned, device=like.device)
    sees = (k_s <= q_t1)[None]
    if starts_BT is not None:
        sees = sees & (k_s >= starts_BT[block.queries.rows, block.queries.place, None])
    bias = torch.zeros(sees.shape, dtype=like.dtype, device=like.device).masked_fill_(~sees, _HIDDEN)
    return bias[:, None, :, : len(block.index)]


def _forward(q_BNtH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, *, bias: Tensor | None, causal: bool) -> Attention:
    """Returns attention of one block: out [B, N, t, H] and lse [B, N, t]."""
    if q_BNtH.device.type == "cpu":
        return torch_compat.cpu_flash_attention(q_BNtH, k_BKsH, v_BKsH, is_causal=causal, attn_mask=bias)
    if bias is None and supports_flash_attention(q_BNtH):
        return torch_compat.flash_attention(q_BNtH, k_BKsH, v_BKsH, 0.0, causal)[:2]
    shape, t = q_BNtH.shape[:2], q_BNtH.shape[2]
    by_group = _split_groups(q_BNtH, k_BKsH, v_BKsH, bias)
    out, lse, *_ = torch_compat.efficient_attention(*by_group, True, is_causal=causal)
    return out.reshape(*shape, t, -1), lse[..., :t].reshape(*shape, t)


def _split_groups(q_BNtH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns q, k, v and bias with kv heads as rows [B K, ...], and each key, not repeated, for all heads of a group.

    Of one row nothing is copied. The kernel itself knows no groups. A block with a bias has one row.
    """
    num_kv = k_BKsH.shape[1]
    groups = q_BNtH.shape[1] // num_kv
    q = q_BNtH.unflatten(1, (num_kv, groups)).flatten(0, 1)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k_BKsH, v_BKsH))
    if bias is not None:
        bias = bias.expand(num_kv, groups, -1, -1)  # of one row
    return q, k, v, bias


def _backward(
    grad_BNtH: Tensor, q_BNtH: Tensor, k_BKsH: Tensor, v_BKsH: Tensor, out_BNtH: Tensor, lse_BNt: Tensor, *,
    bias: Tensor | None, causal: bool,
) -> QKV:  # fmt: skip
    """Returns gradients of one block with respect to q, k and v; `out` and `lse` may be over more keys."""
    if q_BNtH.device.type == "cpu":
        return torch_compat.cpu_flash_attention_backward(
            grad_BNtH, q_BNtH, k_BKsH, v_BKsH, out_BNtH, lse_BNt, 0.0, causal, attn_mask=bias
        )
    t, s = q_BNtH.shape[2], k_BKsH.shape[2]
    if bias is None and supports_flash_attention(q_BNtH):
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BNtH.device)
        return torch_compat.flash_attention_backward(
            grad_BNtH, q_BNtH, k_BKsH, v_BKsH, out_BNtH, lse_BNt.contiguous(), None, None, t, s, 0.0, causal,
            no_dropout, no_dropout,
        )  # fmt: skip
    groups = q_BNtH.shape[1] // k_BKsH.shape[1]
    q, k, v, bias = _split_groups(q_BNtH, k_BKsH, v_BKsH, bias)
    # The kernel reads lse in steps of 32 queries.
    lse_BNt = F.pad(lse_BNt, (0, -t % 32), value=torch.inf)
    grad, out, lse = (x.unflatten(1, (-1, groups)).flatten(0, 1) for x in (grad_BNtH, out_BNtH, lse_BNt))
    no_dropout = torch.zeros((), dtype=torch.int64, device=q_BNtH.device)
    q_grad, k_grad, v_grad, _ = torch_compat.efficient_attention_backward(
        grad, q, k, v, bias, out, lse.contiguous(), no_dropout, no_dropout, 0.0, [True, True, True, False], causal
    )
    return q_grad.reshape(q_BNtH.shape), k_grad.sum(1).view(k_BKsH.shape), v_grad.sum(1).view(v_BKsH.shape)


@torch.library.custom_op("torchtitan_clone::document_attention", mutates_args=())
def document_attention(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor, sinks_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns attention of each token over those from `starts_BT` on and its sink: out [B, T, N, H], lse [B, T, N]."""
    qkv, queries = (q_BTNH, k_BTKH, v_BTKH), _whole_rows(q_BTNH, starts_BT)
    if sinks_N is None and supports_flash_attention(q_BTNH) and queries.segments is not None:
        return varlen.attend_within(qkv, queries.segments)  # over all keys, so that there is nothing to merge
    empty = empty_attention(q_BTNH, sinks_N)
    out_BTNH, lse_BTN = BLOCKWISE.attend(qkv, queries=queries, keys=queries.spans, merge_into=empty)
    return out_BTNH.to(q_BTNH.dtype), lse_BTN


def _whole_rows(q_BTNH: Tensor, starts_BT: Tensor) -> Queries:
    return Queries(spans=(range(q_BTNH.shape[1]),), starts_BT=starts_BT, num_rows=len(q_BTNH))


@document_attention.register_fake
def fake_attention(q_BTNH: Tensor, *_: object) -> Attention:
    """Returns outputs as an operator of attention that has queries, keys and values as its first arguments."""
    out_BTNH, lse_BTN = empty_attention(q_BTNH)
    return out_BTNH.to(q_BTNH.dtype), lse_BTN


@torch.library.custom_op("torchtitan_clone::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, starts_BT: Tensor, out_BTNH: Tensor,
    lse_BTN: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qkv, attention, queries = (q_BTNH, k_BTKH, v_BTKH), (out_BTNH, lse_BTN), _whole_rows(q_BTNH, starts_BT)
    if supports_flash_attention(q_BTNH) and queries.segments is not None:
        gradients = varlen.attend_within_backward(grad_BTNH, qkv, attention, queries.segments)
    else:
        kv_grads = [torch.empty_like(x, dtype=torch.float32) for x in (k_BTKH, v_BTKH)]
        gradients = BLOCKWISE.attend_backward(
            grad_BTNH, qkv, attention, queries=queries, keys=queries.spans, q_grad=None, kv_grads=kv_grads
        ), *kv_grads  # fmt: skip
    q_grad, k_grad, v_grad = (in_layout_of(x, gradient) for x, gradient in zip(qkv, gradients, strict=True))
    return q_grad, k_grad, v_grad


def in_layout_of(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient with the type and strides that fake_gradients() promises for an input."""
    wanted = torch.empty_like(x)
    return gradient if (x.dtype, wanted.stride()) == (gradient.dtype, gradient.stride()) else wanted.copy_(gradient)


@_document_attention_backward.register_fake
def fake_gradients(_grad: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *_: object) -> QKV:
    """Returns outputs as the backward of such an operator."""
    return torch.empty_like(q_BTNH), torch.empty_like(k_BTKH), torch.empty_like(v_BTKH)


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward_of_rows(ctx: BackwardCFunction, grad_BTNH: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    saved = cast("Sequence[Tensor]", ctx.saved_tensors)
    *inputs, sinks_N, out_BTNH, lse_BTN = saved
    sinks_grad_N = None if sinks_N is None else sink_gradients(grad_BTNH, (out_BTNH, lse_BTN), sinks_N)
    return *_document_attention_backward(grad_BTNH, *inputs, out_BTNH, lse_BTN), None, sinks_grad_N


document_attention.register_autograd(_backward_of_rows, setup_context=_save_for_backward)
