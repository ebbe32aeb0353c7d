"""Linear layers. Legend: N rows, I input and O output features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad, share_of_sum
from torchtitan_clone.ops.kernels import faster_grad, faster_product


def is_eager_fp32(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors of a CPU, outside torch.compile and autocast."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 for x in tensors)
    return plain and tensors[0].device.type == "cpu"


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T [..., O]."""
    kernels = faster_product(x, weight_OI)
    return F.linear(x, weight_OI) if kernels is None else kernels.faster_linear(x, weight_OI)


def input_grad(grad: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns d / d x [..., I] of x W^T, from d / d (x W^T) [..., O]."""
    kernels = faster_product(grad, weight_OI)
    return grad @ weight_OI if kernels is None else kernels.faster_linear(grad, weight_OI.T)


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Returns d / d W [O, I] of x W^T, from d / d (x W^T) [..., O] and x [..., I]."""
    grad_ON, x_NI = grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1])
    kernels = faster_grad(grad, x)
    return grad_ON @ x_NI if kernels is None else kernels.faster_linear(grad_ON, x_NI.T)


def add_weight_grad(total_OI: Tensor | None, grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Returns the fp32 total with the weight gradient of some rows added in place, or that of the first rows.

    The product reads and writes the total itself where it can: one of its own costs 10 to 12 bytes more a weight. Not
    compiled: torch.compile would replace a product that adds to its result by a product and an addition.
    """
    if grad_NO.is_cuda and grad_NO.dtype != torch.float32:
        if total_OI is None:
            return torch.mm(grad_NO.T, x_NI, out_dtype=torch.float32)
        return torch.addmm(total_OI, grad_NO.T, x_NI, out_dtype=torch.float32, out=total_OI)
    kernels = faster_grad(grad_NO, x_NI)
    if kernels is not None and grad_NO.dtype == torch.bfloat16 and total_OI is None:
        total_OI = grad_NO.new_zeros(grad_NO.shape[1], x_NI.shape[1], dtype=torch.float32)
    if total_OI is None:
        return _weight_grad(grad_NO, x_NI).float()
    if kernels is not None:
        kernels.add_product_(total_OI, grad_NO.T, x_NI.T)
        return total_OI
    if grad_NO.dtype != torch.float32:
        return total_OI.add_(grad_NO.T @ x_NI)
    return total_OI.addmm_(grad_NO.T, x_NI)


class _GatedLinear(torch.autograd.Function):
    """(silu(gate) * x) W^T; keeps `gate` and `x`, and computes their product again in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x, weight_OI)
        return linear(F.silu(gate).mul_(x), weight_OI)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gate, x, weight_OI = ctx.saved_tensors
        (grad,) = grad_outputs
        weight_grad_OI = None
        if ctx.needs_input_grad[2]:
            weight_grad_OI = _weight_grad(grad, F.silu(gate).mul_(x))
        hidden_grad = input_grad(grad, weight_OI)
        x_grad = F.silu(gate).mul_(hidden_grad)
        return torch.ops.aten.silu_backward(hidden_grad.mul_(x), gate), x_grad, weight_grad_OI


class Linear(nn.Linear):
    """nn.Linear. Without gradients it returns what F.linear does, which with gradients may differ by rounding.

    Of a weight that is a DTensor each rank computes with its shard, if the input is a plain tensor.
    """

    takes_shard = False
    """Whether the weight may be replaced by this rank's shard, a plain tensor, while the module computes."""

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns the result for `input` or, with a gate, for silu(gate) * input, which is not kept for backward."""
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor) and not isinstance(input, DTensor):
            weight, bias = local_with_partial_grad(weight), None if bias is None else share_of_sum(bias)
        if gate is not None:
            out = _GatedLinear.apply(gate, input, weight)
        elif torch.is_grad_enabled() and (kernels := faster_product(input, weight)) is not None:
            out = kernels.faster_linear(input, weight)
        else:
            return F.linear(input, weight, bias)
        return out if bias is None else out + bias
