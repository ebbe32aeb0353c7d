"""Adam's update on a GPU in one pass, which also scales the gradients; these may be in bfloat16.

Importing this module needs Triton. Source of Adam: arXiv 1412.6980; of AdamW: 1711.05101.
"""

from math import inf, log

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _update(
    weight, gradient, exp_avg, exp_avg_sq, step, size, factor, lr, decay, log_beta1, log_beta2, one_minus_beta1,
    one_minus_beta2, eps, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < size
    w = tl.load(weight + index, mask=is_inside)
    m = tl.load(exp_avg + index, mask=is_inside)
    v = tl.load(exp_avg_sq + index, mask=is_inside)
    g = tl.load(gradient + index, mask=is_inside).to(tl.float32) * factor
    # In float64: the powers of beta2 are close to 1 in the first steps.
    steps = tl.load(step).to(tl.float64)
    bias1 = (1.0 - tl.exp(steps * log_beta1)).to(tl.float32)
    bias2 = (1.0 - tl.exp(steps * log_beta2)).to(tl.float32)
    if DECOUPLED:
        w -= lr * decay * w
    else:
        g += decay * w
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g * g - v)
    w -= lr / bias1 * m / (tl.sqrt(v) / tl.sqrt(bias2) + eps)
    tl.store(weight + index, w, mask=is_inside)
    tl.store(exp_avg + index, m, mask=is_inside)
    tl.store(exp_avg_sq + index, v, mask=is_inside)


def _log(beta: float) -> float:
    return log(beta) if beta else -inf


def update_(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, *, factor: float, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, decoupled_weight_decay: float,
) -> None:  # fmt: skip
    """Updates an fp32 weight and its moments in place by a gradient in fp32 or bfloat16 times `factor`.

    All are contiguous and of one shape; `step` [] is the number of this step from 1 on, fp32 on the device. The other
    arguments are those of torch.optim.Adam.
    """
    size = weight.numel()
    with torch.cuda.device_of(weight):
        _update[(triton.cdiv(size, _BLOCK),)](  # pyright: ignore[reportIndexIssue]
            weight, gradient, exp_avg, exp_avg_sq, step, size, factor, lr, weight_decay, _log(beta1), _log(beta2),
            1 - beta1, 1 - beta2, eps, DECOUPLED=bool(decoupled_weight_decay), BLOCK=_BLOCK,
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
