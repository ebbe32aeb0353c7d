"""A causal convolution of each channel over the last few tokens of a document, followed by SiLU.

Legend: B batch, T tokens, C channels, W width: a token's own weight is the last; t tokens of a block.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = {"cpu": 2**18, "cuda": 2**30}
"""Elements that are computed together: on a CPU those that stay in its caches."""
_CONTIGUOUS = torch.contiguous_format


@torch.library.custom_op("torchtitan_clone::short_convolution", mutates_args=())
def short_convolution(
    x_BTC: Tensor, weight_CW: Tensor, starts_BT: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Returns silu(sum_w weight_w x_(t - W + 1 + w)) of each channel [B, T, C], in fp32 and rounded once.

    `starts_BT` are the indices of the first tokens of each token's document, those before it count as zero; negative or
    None: it began before. `before` are the W - 1 tokens before the first [B, W - 1, C], zeros by default.
    """
    out_BTC = torch.empty_like(x_BTC, memory_format=_CONTIGUOUS)
    weight_WC = weight_CW.float().T.contiguous()
    for span, taps in _blocks(x_BTC, len(weight_WC), starts_BT, before):
        out_BTC[:, span] = F.silu(_sum_taps(taps, weight_WC), inplace=True)
    return out_BTC


@short_convolution.register_fake
def _empty(x_BTC: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_BTC, memory_format=_CONTIGUOUS)


@torch.library.custom_op("torchtitan_clone::short_convolution_backward", mutates_args=())
def short_convolution_backward(
    grad_BTC: Tensor, x_BTC: Tensor, weight_CW: Tensor, starts_BT: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients with respect to the tokens, the weight and the tokens before the first."""
    weight_WC = weight_CW.float().T.contiguous()
    W = len(weight_WC)
    weight_grad_WC, x_grad_BTC = torch.zeros_like(weight_WC), torch.empty_like(x_BTC, memory_format=_CONTIGUOUS)
    before_grad = x_BTC.new_empty(len(x_BTC), W - 1, x_BTC.shape[2])
    for span, taps in _blocks(x_BTC, W, starts_BT, before):
        sum_grad_BtC = torch.ops.aten.silu_backward(grad_BTC[:, span].float(), _sum_taps(taps, weight_WC))
        padded = F.pad(sum_grad_BtC * weight_WC[-1], (0, 0, W - 1, 0))
        weight_grad_WC[-1] += (sum_grad_BtC * taps[-1][0]).sum((0, 1))
        for index, (tap_BtC, counts_Bt1) in enumerate(taps[:-1]):
            counted_BtC = sum_grad_BtC if counts_Bt1 is None else sum_grad_BtC * counts_Bt1
            weight_grad_WC[index] += (counted_BtC * tap_BtC).sum((0, 1))
            padded[:, index : index + tap_BtC.shape[1]].addcmul_(counted_BtC, weight_WC[index])
        x_grad_BTC[:, span] = padded[:, W - 1 :]
        earlier = x_grad_BTC[:, span.start - W + 1 : span.start] if span.start else before_grad.zero_()
        earlier += padded[:, : W - 1]
    return x_grad_BTC, weight_grad_WC.T.to(weight_CW.dtype).contiguous(), before_grad


@short_convolution_backward.register_fake
def _empty_gradients(
    _grad: Tensor, x_BTC: Tensor, weight_CW: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    before_grad = x_BTC.new_empty(len(x_BTC), weight_CW.shape[1] - 1, x_BTC.shape[2])
    return _empty(x_BTC), _empty(weight_CW), before_grad


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    x, weight, before = short_convolution_backward(grad_BTC, *tensors)
    return x, weight, None, None if tensors[3] is None else before


short_convolution.register_autograd(_backward, setup_context=_save_for_backward)

_Taps = list[tuple[Tensor, Tensor | None]]
"""For each weight its tokens [B, t, C], and which of them count [B, t, 1], None for all."""


def _blocks(
    x_BTC: Tensor, width: int, starts_BT: Tensor | None, before: Tensor | None
) -> Iterator[tuple[slice, _Taps]]:  # fmt: skip
    """Yields blocks of tokens with what each weight multiplies."""
    B, T, C = x_BTC.shape
    size = max(width, _BLOCK.get(x_BTC.device.type, _BLOCK["cuda"]) // (B * C))
    before = x_BTC.new_zeros(B, width - 1, C) if before is None else before
    for first in range(0, T, size):
        span = slice(first, min(first + size, T))
        earlier = x_BTC[:, first - width + 1 : first] if first else before
        padded, t = torch.cat((earlier, x_BTC[:, span]), dim=1).float(), span.stop - first
        counts = [_counted(starts_BT, span=span, lag=width - 1 - index) for index in range(width)]
        yield span, [(padded[:, index : index + t], counts[index]) for index in range(width)]


def _counted(starts_BT: Tensor | None, *, span: slice, lag: int) -> Tensor | None:
    """Returns which tokens of a block are in one document with the one `lag` tokens before [B, t, 1]; None: all."""
    if starts_BT is None or lag == 0:
        return None
    index_T = torch.arange(span.start - lag, span.stop - lag, device=starts_BT.device)
    counts_Bt = starts_BT[:, span] <= index_T
    is_known = starts_BT.device.type == "cpu"  # elsewhere asking would be a host sync
    return None if is_known and bool(counts_Bt.all()) else counts_Bt[..., None]


def _sum_taps(taps: _Taps, weight_WC: Tensor) -> Tensor:
    """Returns the convolution before SiLU [B, t, C]."""
    total_BtC = taps[-1][0] * weight_WC[-1]
    for (tap_BtC, counts_Bt1), weight_C in zip(taps[:-1], weight_WC, strict=False):
        total_BtC.addcmul_(tap_BtC if counts_Bt1 is None else tap_BtC * counts_Bt1, weight_C)
    return total_BtC
