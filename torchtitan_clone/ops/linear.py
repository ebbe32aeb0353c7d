"""Linear layers whose products a CPU computes in fp32 by the fastest of MKL, oneDNN and C++ of this package.

On processors of AMD MKL has no kernels with AVX-512, but oneDNN has; with AVX2 alone C++ is faster than both.
Legend: N rows, I input and O output features.
"""

import ctypes
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.cpp_library import is_loaded, loaded_library
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad, share_of_sum
from torchtitan_clone.torch_compat import ONEDNN_PRODUCTS, onednn_linear


def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


IS_AMD = _is_amd()
_HAS_BOTH = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
HAS_FASTER_ONEDNN = IS_AMD and _HAS_BOTH and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether MKL computes in fp32 without the AVX-512 that this processor has."""
HAS_FASTER_CPP = IS_AMD and torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether C++ of this package computes outputs and input gradients of linear layers faster than MKL and oneDNN."""
ONEDNN_GRAD_WIDTH = 768
"""From so many features on, gradients of the output projection are as fast without oneDNN, and the copies it needs."""


def _is_fp32(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors of a CPU, outside autocast."""
    if torch.is_autocast_enabled("cpu"):
        return False
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 for x in tensors)
    return plain and tensors[0].device.type == "cpu"


def is_eager_fp32(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors of a CPU, outside torch.compile and autocast."""
    return not torch.compiler.is_compiling() and _is_fp32(*tensors)


def is_for_onednn(*matrices: Tensor) -> bool:
    """Whether oneDNN multiplies these matrices faster than what torch calls."""
    return HAS_FASTER_ONEDNN and _is_fp32(*matrices)


def is_for_cpp(*matrices: Tensor) -> bool:
    """Whether C++ multiplies these matrices faster than what torch calls."""
    return HAS_FASTER_CPP and _is_fp32(*matrices) and is_loaded()


def has_faster_product(*matrices: Tensor) -> bool:
    """Whether faster_linear() is faster than what torch calls."""
    return is_for_cpp(*matrices) if HAS_FASTER_CPP else is_for_onednn(*matrices)


@torch.library.custom_op("torchtitan_clone::faster_linear", mutates_args=())
def _faster_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """An operator, which modes of dispatch and torch.compile see; inductor takes none of oneDNN as it is."""
    return multiply_by_cpp(x, weight_OI) if HAS_FASTER_CPP else onednn_linear(x, weight_OI)


@_faster_linear.register_fake
def _result_like(x: Tensor, weight_OI: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


def faster_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T where has_faster_product() is true; both may be transposed views."""
    is_eager_onednn = HAS_FASTER_ONEDNN and not torch.compiler.is_compiling()
    return onednn_linear(x, weight_OI) if is_eager_onednn else _faster_linear(x, weight_OI)


PRODUCTS = ONEDNN_PRODUCTS | {torch.ops.torchtitan_clone.faster_linear.default}
"""Operators that faster_linear() calls."""


def multiply_by_cpp(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T by C++; ValueError if these are not fp32 tensors of a CPU or their sizes differ."""
    tensors = (x, weight_OI)
    is_taken = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    if not is_taken or weight_OI.dim() != 2 or x.shape[-1:] != weight_OI.shape[1:]:
        found = [(t.device.type, t.dtype, tuple(t.shape)) for t in tensors]
        raise ValueError(f"x W^T by C++ does not take {found}: use fp32 tensors of a CPU, [..., I] and [O, I]")
    out = x.new_empty(*x.shape[:-1], len(weight_OI))
    if 0 in (x.numel(), weight_OI.numel()):
        return out.zero_()
    x_NI = x.reshape(-1, x.shape[-1])
    strides = (*x_NI.stride(), *weight_OI.T.stride())
    sizes = (ctypes.c_int64 * 7)(len(x_NI), len(weight_OI), x_NI.shape[1], *strides)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x_NI, weight_OI, out)]
    loaded_library().multiply_matrices(*pointers, sizes)
    return out


def has_onednn_grads(factor: Tensor, x_NI: Tensor) -> bool:
    """Whether oneDNN computes the gradients of an output projection with these inputs and this other factor."""
    return x_NI.shape[1] < ONEDNN_GRAD_WIDTH and is_for_onednn(factor, x_NI)


def add_weight_grad(total_OI: Tensor | None, grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Returns the fp32 total with the weight gradient of some rows added in place, or that of the first rows.

    The product reads and writes the total itself where it can: one of its own costs 10 to 12 bytes more a weight. Not
    compiled: torch.compile would replace a product that adds to its result by a product and an addition.
    """
    if grad_NO.is_cuda and grad_NO.dtype != torch.float32:
        if total_OI is None:
            return torch.mm(grad_NO.T, x_NI, out_dtype=torch.float32)
        return torch.addmm(total_OI, grad_NO.T, x_NI, out_dtype=torch.float32, out=total_OI)
    is_onednn = has_onednn_grads(grad_NO, x_NI)
    if total_OI is not None and grad_NO.dtype == torch.float32 and not is_onednn:
        return total_OI.addmm_(grad_NO.T, x_NI)
    grad_OI = onednn_linear(x_NI.T, grad_NO.T).T if is_onednn else grad_NO.T @ x_NI
    return grad_OI.float() if total_OI is None else total_OI.add_(grad_OI)


def _product(x: Tensor, weight_OI: Tensor) -> Tensor:
    return faster_linear(x, weight_OI) if has_faster_product(x, weight_OI) else F.linear(x, weight_OI)


def _input_grad(grad: Tensor, weight_OI: Tensor) -> Tensor:
    return faster_linear(grad, weight_OI.T) if has_faster_product(grad, weight_OI) else grad @ weight_OI


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    # MKL is as fast for this product over many rows; oneDNN would copy both matrices transposed.
    return grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class _FasterLinear(torch.autograd.Function):
    """x W^T. Pipeline schedules that split backward compute both gradients in both halves of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return faster_linear(x, weight_OI)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        x, weight_OI = ctx.saved_tensors
        (grad,) = grad_outputs
        x_grad = faster_linear(grad, weight_OI.T) if ctx.needs_input_grad[0] else None
        return x_grad, _weight_grad(grad, x) if ctx.needs_input_grad[1] else None


def _backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight_OI = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
    needs_x, needs_weight = cast("tuple[bool, bool]", ctx.needs_input_grad)
    x_grad = faster_linear(grad, weight_OI.T) if needs_x else None
    return x_grad, _weight_grad(grad, x) if needs_weight else None


def _setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_faster_linear.register_autograd(_backward, setup_context=_setup_context)


class _GatedLinear(torch.autograd.Function):
    """(silu(gate) * x) W^T; keeps `gate` and `x`, and computes their product again in backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x, weight_OI)
        return _product(F.silu(gate).mul_(x), weight_OI)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        gate, x, weight_OI = ctx.saved_tensors
        (grad,) = grad_outputs
        weight_grad_OI = _weight_grad(grad, F.silu(gate).mul_(x)) if ctx.needs_input_grad[2] else None
        hidden_grad = _input_grad(grad, weight_OI)
        x_grad = F.silu(gate).mul_(hidden_grad)
        return torch.ops.aten.silu_backward(hidden_grad.mul_(x), gate), x_grad, weight_grad_OI


class Linear(nn.Linear):
    """nn.Linear. Without gradients it returns what F.linear does, which with gradients may differ by rounding.

    Of a weight that is a DTensor each rank computes with its shard, if the input is a plain tensor.
    """

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns the result for `input` or, with a gate, for silu(gate) * input, which is not kept for backward."""
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor) and not isinstance(input, DTensor):
            weight, bias = local_with_partial_grad(weight), None if bias is None else share_of_sum(bias)
        if gate is not None:
            out = _GatedLinear.apply(gate, input, weight)
        elif torch.is_grad_enabled() and has_faster_product(input, weight):
            # With the backend "eager" a compiled autograd.Function keeps its tensors after backward.
            out = (faster_linear if torch.compiler.is_compiling() else _FasterLinear.apply)(input, weight)
        else:
            return F.linear(input, weight, bias)
        return out if bias is None else out + bias
