"""Products of groups of rows, each group with a matrix of its own, and their biases, for mixtures of experts.

torch's grouped product as a custom operator: it also takes float32 on the meta device, and activation checkpointing
can name it. Legend: N rows, sorted by group; E groups; D, F sizes, multiples of 16 bytes.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx


@torch.library.custom_op("torchtitan_clone::grouped_mm", mutates_args=())
def grouped_mm(x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Returns [N, F]: the rows `ends[e - 1]:ends[e]` times the transpose of `weight[e]`; `ends` is int32 up to N."""
    return _grouped(x_ND, weight_EFD.transpose(-2, -1), ends_E)


@grouped_mm.register_fake
def _(x_ND: Tensor, weight_EFD: Tensor, _ends_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EFD.shape[1])


@torch.library.custom_op("torchtitan_clone::grouped_mm_input_grad", mutates_args=())
def _input_grad(grad_NF: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    return _grouped(grad_NF.contiguous(), weight_EFD, ends_E)


@_input_grad.register_fake
def _(grad_NF: Tensor, weight_EFD: Tensor, _ends_E: Tensor) -> Tensor:
    return grad_NF.new_empty(grad_NF.shape[0], weight_EFD.shape[2])


@torch.library.custom_op("torchtitan_clone::grouped_mm_weight_grad", mutates_args=())
def _weight_grad(grad_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    if _has_kernel(x_ND):
        return F.grouped_mm(grad_NF.contiguous().T, x_ND, offs=ends_E)
    return torch.stack([grad_NF[piece].T @ x_ND[piece] for piece in _groups(ends_E)])


@_weight_grad.register_fake
def _(grad_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    return grad_NF.new_empty(ends_E.shape[0], grad_NF.shape[1], x_ND.shape[1])


def _grouped(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    if _has_kernel(x_ND):
        return F.grouped_mm(x_ND, weight_EDF, offs=ends_E)
    return torch.cat([x_ND[piece] @ weight_EDF[e] for e, piece in enumerate(_groups(ends_E))])


def _has_kernel(x: Tensor) -> bool:
    """CUDA's kernel takes bfloat16 only; without it every group is a product of its own, after a host sync."""
    return x.device.type == "cpu" or x.dtype == torch.bfloat16


def _groups(ends_E: Tensor) -> list[slice]:
    ends = ends_E.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_ND, weight_EFD, ends_E = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    x_grad = _input_grad(grad_NF, weight_EFD, ends_E) if needs_x else None
    return x_grad, _weight_grad(grad_NF, x_ND, ends_E) if needs_weight else None, None


grouped_mm.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def rows_of_groups(values_EF: Tensor, ends_E: Tensor, *, num_rows: int) -> Tensor:
    """Returns [N, F]: the row of `values` for the group of each row; its gradient sums over the rows of the group."""
    index = torch.arange(num_rows, dtype=torch.int32, device=ends_E.device)
    return _RowsOfGroups.apply(values_EF, torch.searchsorted(ends_E, index, right=True))


class _RowsOfGroups(torch.autograd.Function):
    """Indexes rows. Compiled code of torch's own backward adds by atomics, in an order that varies."""

    @staticmethod
    def forward(ctx: FunctionCtx, values_EF: Tensor, groups_N: Tensor) -> Tensor:
        ctx.save_for_backward(values_EF, groups_N)
        return values_EF[groups_N]

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor):
        values_EF, groups_N = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        return _group_sums(grads[0], groups_N, len(values_EF)), None


@torch.library.custom_op("torchtitan_clone::group_sums", mutates_args=())
def _group_sums(x_NF: Tensor, groups_N: Tensor, num_groups: int) -> Tensor:
    """Returns [E, F]: sums of the rows of each group, one row after another."""
    sums = x_NF.new_zeros(num_groups, x_NF.shape[1])
    if x_NF.device.type == "cpu":
        return sums.index_add_(0, groups_N, x_NF)  # adds by atomics on a GPU
    return sums.index_put_((groups_N,), x_NF, accumulate=True)  # sorts the rows there


@_group_sums.register_fake
def _(x_NF: Tensor, _groups_N: Tensor, num_groups: int) -> Tensor:
    return x_NF.new_empty(num_groups, x_NF.shape[1])
