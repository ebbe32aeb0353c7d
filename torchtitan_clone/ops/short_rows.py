"""Causal attention over short rows in bfloat16 with AMX: torch's forward, and a backward by batched products.

torch's backward splits fewer than 768 queries into blocks of 64 and calls thousands of small products. Legend: B batch,
T tokens, N heads, K kv heads, H head dim; G heads of all rows, t queries and s keys that are computed at a time.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from torchtitan_clone.torch_compat import HAS_AMX, cpu_flash_attention, is_fake, softmax_backward

_LONG_ROW = 768
_QUERIES = 256
_SCORES = 2**21
"""Scores that are computed at a time, so that they stay in the cache."""


def takes_short_rows(q_BTNH: Tensor) -> bool:
    """Whether causal_attention() is faster than torch's backward for these queries, on this processor."""
    is_short = q_BTNH.device.type == "cpu" and q_BTNH.dtype == torch.bfloat16 and q_BTNH.shape[1] < _LONG_ROW
    # A simulation is the same on every machine.
    return HAS_AMX and is_short and (torch.compiler.is_compiling() or not is_fake(q_BTNH))


@torch.library.custom_op("torchtitan_clone::causal_attention", mutates_args=())
def causal_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    """Returns attention of each token over those until itself [B, T, N, H]."""
    out_BNTH, _ = cpu_flash_attention(*(x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH)), is_causal=True)
    return out_BNTH.transpose(1, 2).contiguous()


@causal_attention.register_fake
def _fake_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
    return torch.empty_like(q_BTNH, memory_format=torch.contiguous_format)


@torch.library.custom_op("torchtitan_clone::causal_attention_backward", mutates_args=())
def _causal_attention_backward(
    grad_BTNH: Tensor, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, N, _ = q_BTNH.shape
    groups = N // k_BTKH.shape[2]
    if groups > 1:
        k_BTKH, v_BTKH = (x.repeat_interleave(groups, dim=2) for x in (k_BTKH, v_BTKH))
    inputs = [x.transpose(1, 2).flatten(0, 1) for x in (grad_BTNH, q_BTNH, k_BTKH, v_BTKH)]
    gradients = [torch.empty_like(x) for x in inputs[1:]]
    # The last queries have all keys.
    for first in reversed(range(0, T, _QUERIES)):
        last = min(first + _QUERIES, T)
        size = max(1, _SCORES // ((last - first) * last))
        for head in range(0, B * N, size):
            G, t, s = slice(head, head + size), slice(first, last), slice(last)
            grad, q, k, v = (x[G, place] for x, place in zip(inputs, (t, t, s, s), strict=True))
            q_grad, k_grad, v_grad = (x[G, place] for x, place in zip(gradients, (t, s, s), strict=True))
            _add_gradients(q_grad, k_grad, v_grad, grad, q, k, v, is_first=last == T)
    q_grad, *others = (x.unflatten(0, (B, N)).transpose(1, 2) for x in gradients)
    if groups > 1:
        others = [x.unflatten(2, (-1, groups)).sum(3) for x in others]
    q_grad, k_grad, v_grad = (x.contiguous() for x in (q_grad, *others))
    return q_grad, k_grad, v_grad


def _add_gradients(
    q_grad_GtH: Tensor, k_grad_GsH: Tensor, v_grad_GsH: Tensor, grad_GtH: Tensor, q_GtH: Tensor, k_GsH: Tensor,
    v_GsH: Tensor, *, is_first: bool,
) -> None:  # fmt: skip
    """Writes the gradients of some heads by the last t queries, and writes or adds those by all s keys and values."""
    t = q_GtH.shape[1]
    scale = q_GtH.shape[2] ** -0.5
    scores_Gts = _product(q_GtH, k_GsH.mT, scale=scale)
    scores_Gts[..., -t:] += torch.full((t, t), -torch.inf, dtype=scores_Gts.dtype).triu_(1)
    probs_Gts = scores_Gts.softmax(-1)
    torch.bmm(grad_GtH, v_GsH.mT, out=scores_Gts)
    scores_grad_Gts = softmax_backward(scores_Gts, probs_Gts, -1, scores_Gts.dtype)
    q_grad_GtH.copy_(_product(scores_grad_Gts, k_GsH, scale=scale))
    k_grad, v_grad = _product(scores_grad_Gts.mT, q_GtH, scale=scale), torch.bmm(probs_Gts.mT, grad_GtH)
    for total, gradient in ((k_grad_GsH, k_grad), (v_grad_GsH, v_grad)):
        total.copy_(gradient) if is_first else total.add_(gradient)


def _product(a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Returns a b, scaled before it is rounded."""
    return a.new_empty(len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


@_causal_attention_backward.register_fake
def _fake_gradients(_grad: Tensor, *qkv: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv)


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: BackwardCFunction, grad_BTNH: Tensor) -> tuple[Tensor, ...]:
    return _causal_attention_backward(grad_BTNH, *cast("Sequence[Tensor]", ctx.saved_tensors))


causal_attention.register_autograd(_backward, setup_context=_save_for_backward)
