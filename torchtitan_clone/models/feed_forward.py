"""Feed-forward layers. Legend: B batch, T tokens, D model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchtitan_clone.ops.linear import Linear
from torchtitan_clone.torch_compat import simulates_gpu


class _Gated(torch.autograd.Function):
    """silu(gate) * x; keeps both for backward, and computes silu(gate) again."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return F.silu(gate).mul_(x)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gate, x = ctx.saved_tensors
        (grad,) = grad_outputs
        return torch.ops.aten.silu_backward(grad * x, gate), F.silu(gate).mul_(grad)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x). Source: arXiv 2002.05202."""

    def __init__(self, *, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, bias=False)
        self.w2 = Linear(hidden_dim, dim, bias=False)
        self.w3 = Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BTD: Tensor, _is_context_BT: Tensor | None = None) -> Tensor:
        """Returns [B, T, D]; in a model with routers it may get what these get besides."""
        gate, x = self.w1(x_BTD), self.w3(x_BTD)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.w2(F.silu(gate) * x)  # a compiler finds out by itself what to compute again
        if gate.device.type == "cpu" and type(self.w2) is Linear and not simulates_gpu(gate):
            return self.w2(x, gate)
        return self.w2(_Gated.apply(gate, x))
