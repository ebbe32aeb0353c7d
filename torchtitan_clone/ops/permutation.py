"""Permutations of rows, whose gradients need no sum."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def inverse(order: Tensor) -> Tensor:
    """Returns the permutation [N] that undoes `order` [N]: the position of each number in it."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Permute(torch.autograd.Function):
    """Rows [N, D] at the positions of a permutation [N]."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_ND: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return rows_ND[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (order_N,) = ctx.saved_tensors
        grad_ND = torch.empty_like(grads[0])
        grad_ND[order_N] = grads[0]
        return grad_ND, None
