"""Adam and AdamW with moments in another data type than weights, in bfloat16 by stochastic rounding.

Sources: arXiv 1412.6980, 1711.05101. Operations of torch round once each: a CPU and a GPU compute the same bits, which
fused multiplications and additions do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.ops.stochastic_rounding import chunks, round_into
from torchtitan_clone.torch_compat import is_fake


@torch.no_grad()
def update_(
    parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, name: str, seed: int, factor: float,
    group: Mapping[str, Any],
) -> None:  # fmt: skip
    """Updates a parameter and its moments in place by a gradient times `factor`; computes in fp32, chunk by chunk.

    `group` has the options of torch.optim.Adam.
    """
    state["step"].add_(1)
    step = 1 if is_fake(state["step"]) else int(state["step"].item())  # on the CPU
    for chunk in chunks(parameter, seed=seed, step=step, name=name):
        moments = [(chunk.of(state["exp_avg"]), chunk.first), (chunk.of(state["exp_avg_sq"]), chunk.second)]
        weight, moved = chunk.of(parameter.detach()), chunk.of(gradient).float()
        moved = moved * factor if factor != 1.0 else moved
        for (target, draws), values in zip(moments, _updated(weight, moved, moments, step, group), strict=True):
            round_into(target, values, draws) if target.dtype == torch.bfloat16 else target.copy_(values)


def _updated(
    weight: Tensor, gradient: Tensor, moments: Sequence[tuple[Tensor, Tensor]], step: int, group: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Updates a weight in place; returns its new moments, fp32."""
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    w = weight.float()
    if group["decoupled_weight_decay"]:
        w = w * (1 - lr * decay)
    elif decay:
        gradient = gradient + w * decay
    (exp_avg, _), (exp_avg_sq, _) = moments
    m = (exp_avg.float() * beta1).add_(gradient * (1 - beta1))
    v = (exp_avg_sq.float() * beta2).add_((gradient * gradient).mul_(1 - beta2))
    # Not divided by the number, instead of which torch multiplies by its reciprocal on a GPU.
    denominator = v.sqrt().mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
    weight.copy_(w - (m * (lr / (1 - beta1**step))).div_(denominator))
    return m, v
