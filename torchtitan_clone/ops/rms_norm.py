"""RMSNorm with a backward of fewer passes over the features than torch has on a CPU. Legend: D features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.linear import is_eager_fp32
from torchtitan_clone.torch_compat import simulates_gpu


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        # In the order of torch's kernel, to the bit.
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        x, weight_D, scale = ctx.saved_tensors
        (grad,) = grad_outputs
        products = grad * x
        factor = (products @ weight_D).unsqueeze_(-1).mul_(scale.pow(3)).div_(-x.shape[-1])
        weight_grad_D = products.mul_(scale).sum_to_size(weight_D.shape)
        return (grad * weight_D).mul_(scale).addcmul_(x, factor), weight_grad_D, None


class _SimulatedNorm(torch.autograd.Function):
    """Allocates and keeps what the kernel of a GPU does; on fake tensors of a CPU torch would convert all to fp32."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight_D: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_D, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        x, weight_D, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight_D)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm; of plain tensors also with a weight that is a DTensor. Source: arXiv 1910.07467."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if isinstance(x, DTensor) else local_with_partial_grad(self.weight)
        if torch.is_grad_enabled() and is_eager_fp32(x, weight):
            return _RMSNorm.apply(x, weight, self.eps)
        if weight.dtype == x.dtype and simulates_gpu(x) and not isinstance(x, DTensor):
            return _SimulatedNorm.apply(x, weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)
