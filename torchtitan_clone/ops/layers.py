"""The layers that all decoders share: linear layers, feed-forwards, norms and embedding.

On a CPU their functions of autograd keep and pass over less memory than torch's. Of a weight that is a DTensor each
rank computes with its shard, if the input is a plain tensor.
Legend: B batch, T tokens, D features or model, N rows or heads, H head dim, I input and O output features.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad, share_of_sum
from torchtitan_clone.ops.kernels import CPU, CpuKernels
from torchtitan_clone.ops.weight_use import GATED, LAST, WeightUse, WeightUses
from torchtitan_clone.torch_compat import is_fake, simulates_gpu


def is_eager_fp32(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors of a CPU, outside torch.compile and autocast."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 for x in tensors)
    return plain and tensors[0].device.type == "cpu"


def faster_product(x: Tensor, weight_OI: Tensor) -> CpuKernels | None:
    """Returns the kernels that multiply these matrices faster than torch."""
    return CPU if CPU is not None and CPU.has_faster_product(x, weight_OI) else None


def _faster_grad(grad: Tensor, x: Tensor) -> CpuKernels | None:
    """Returns the kernels that compute the gradient of a weight faster, from those of its result and its input."""
    return CPU if CPU is not None and CPU.has_faster_grad(grad, x) else None


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
    kernels = _faster_grad(grad, x)
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
    kernels = _faster_grad(grad_NO, x_NI)
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
    """nn.Linear. Without gradients it returns what F.linear does, which with gradients may differ by rounding."""

    holds_shard = False
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


class TokenLinear(nn.Linear):
    """A projection that each tensor-parallel rank computes for its own tokens, with the complete weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local_with_partial_grad(self.weight))


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


def gated_linear(linear: nn.Module, gate: Tensor, x: Tensor) -> Tensor:
    """Returns the result of a linear layer for silu(gate) * x, which is not kept for backward."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return linear(F.silu(gate) * x)  # a compiler finds out by itself what to compute again
    if gate.device.type == "cpu" and type(linear) is Linear and not simulates_gpu(gate):
        return linear(x, gate)
    return linear(_Gated.apply(gate, x))


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x). Source: arXiv 2002.05202."""

    WEIGHT_USES: ClassVar[WeightUses] = {"w1.weight": GATED, "w3.weight": GATED, "w2.weight": LAST}

    def __init__(self, *, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, bias=False)
        self.w2 = Linear(hidden_dim, dim, bias=False)
        self.w3 = Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BTD: Tensor, _is_context_BT: Tensor | None = None) -> Tensor:
        """Returns [B, T, D]; in a model with routers it may get what these get besides."""
        return gated_linear(self.w2, self.w1(x_BTD), self.w3(x_BTD))


class GeGLU(SwiGLU):
    """w2(gelu(w1 x) * w3 x), with the approximation of gelu by tanh. Source: arXiv 2002.05202."""

    def forward(self, x_BTD: Tensor, _is_context_BT: Tensor | None = None) -> Tensor:
        return self.w2(F.gelu(self.w1(x_BTD), approximate="tanh") * self.w3(x_BTD))


GELUApproximation = Literal["none", "tanh"]
"""As in torch.nn.functional.gelu()."""


class GELUFeedForward(nn.Module):
    """w2(gelu(w1 x)). Source: arXiv 1606.08415."""

    WEIGHT_USES: ClassVar[WeightUses] = {"w1.weight": WeightUse(saved=2.0), "w2.weight": LAST}

    def __init__(self, *, dim: int, hidden_dim: int, bias: bool, approximate: GELUApproximation):
        super().__init__()
        self.approximate = approximate
        self.w1 = Linear(dim, hidden_dim, bias=bias)
        self.w2 = Linear(hidden_dim, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x_BTD), approximate=self.approximate))


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


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm times 1 + weight, in float32; the weight starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + (self.weight if isinstance(x, DTensor) else local_with_partial_grad(self.weight)).float()
        if torch.is_grad_enabled() and is_eager_fp32(x, weight):
            return _RMSNorm.apply(x, weight, self.eps)
        if simulates_gpu(x) and not isinstance(x, DTensor):
            return _SimulatedNorm.apply(x.float(), weight).type_as(x)
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm; of plain tensors also with a weight and a bias that are DTensors. Source: arXiv 1607.06450."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, DTensor):
            return super().forward(input)
        weight, bias = (None if x is None else local_with_partial_grad(x) for x in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class MeanSquare(nn.Module):
    """Mean square of the features of all heads, [B, T, 1, 1] in fp32; tensor parallelism averages over the ranks."""

    def forward(self, x_BTNH: Tensor) -> Tensor:
        return x_BTNH.float().square().mean(dim=(-2, -1), keepdim=True)


class RMSNormOfHeads(nn.RMSNorm):
    """RMSNorm of all heads together: [B, T, N, H], with N H weights."""

    def __init__(self, size: int, *, eps: float):
        super().__init__(size, eps=eps)
        self.mean_square = MeanSquare()

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        weight_NH = local_with_partial_grad(self.weight).unflatten(0, x.shape[2:])
        return (x.float() * (self.mean_square(x) + self.eps).rsqrt() * weight_NH).type_as(x)


def look_up(index: Tensor, weight_ND: Tensor) -> Tensor:
    """Returns rows of the weight [*, D]; in float32 where a CPU trains in bfloat16, with the same results.

    torch's backward adds the gradient of one row after another to a total in the weight's type there, in which the
    gradients of frequent rows are lost.
    """
    if weight_ND.dtype != torch.bfloat16 or weight_ND.device.type != "cpu" or is_fake(weight_ND):
        return F.embedding(index, weight_ND)
    return F.embedding(index, weight_ND.float()).to(weight_ND.dtype)


class LearnedPositions(nn.Module):
    """Adds a vector to each token by its position."""

    def __init__(self, count: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        return x_BTD + look_up(positions_BT, local_with_partial_grad(self.weight))


class Embedding(nn.Embedding):
    """Vectors of tokens, with learned positions if there are any."""

    def __init__(self, num_tokens: int, dim: int, *, positions: int = 0):
        super().__init__(num_tokens, dim)
        self.positions = LearnedPositions(positions, dim) if positions else None

    def forward(self, input: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Returns [B, T, D]; the positions are read if they are learned."""
        out = look_up(input, self.weight)
        if self.positions is None:
            return out
        assert positions_BT is not None
        return self.positions(out, positions_BT)
