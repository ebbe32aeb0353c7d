"""Products in fp32 by C++ where it is faster than torch: on processors of AMD.

Legend: N rows, I input and O output features.
"""

import ctypes
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from torchtitan_clone.cpu.library import is_loaded, loaded_library
from torchtitan_clone.torch_compat import OUT_TAGS


def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


IS_AMD = _is_amd()
HAS_FASTER_CPP = IS_AMD and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether C++ multiplies faster than torch on this processor."""
MIN_WEIGHTS_FOR_GRAD = 2**18
"""Torch computes the gradients of smaller weights, which is faster when the result is small and the sums long."""
MIN_PRODUCTS = 2**25
"""Torch multiplies matrices with fewer products of numbers, which takes less time than the call of an own operator."""


def has_faster_product(x: Tensor, weight: Tensor) -> bool:
    """Whether C++ multiplies these matrices faster than torch."""
    return x.numel() * weight.shape[0] >= MIN_PRODUCTS and _takes_cpp(x, weight)


def _takes_cpp(*matrices: Tensor) -> bool:
    """Whether C++ multiplies large matrices of their kind faster than torch."""
    if torch.is_autocast_enabled("cpu") or matrices[0].device.type != "cpu":
        return False
    is_plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 for x in matrices)
    return HAS_FASTER_CPP and is_plain and is_loaded()


# The tag allows any strides. Without it, inductor would compute an input of several products once for each of them.
@torch.library.custom_op("torchtitan_clone::faster_linear", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def faster_linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Returns x W^T [..., O], computed by C++, for x [..., I] and W [O, I], which may be transposed views.

    A custom operator, so that dispatch modes and torch.compile see it. ValueError for sizes that differ, and for
    tensors that are not in fp32 on a CPU.
    """
    return _write_product(_empty_product(x, weight_OI), x, weight_OI)


@faster_linear.register_fake
def _empty_product(x: Tensor, weight_OI: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])


# Inductor calls this overload to write results into memory that it has planned.
_OUT_SCHEMA = "(Tensor x, Tensor weight_OI, *, Tensor(a!) out) -> Tensor(a!)"
torch.library.define("torchtitan_clone::faster_linear.out", _OUT_SCHEMA, tags=OUT_TAGS)


@torch.library.impl("torchtitan_clone::faster_linear.out", "CPU")
def _faster_linear_out(x: Tensor, weight_OI: Tensor, *, out: Tensor) -> Tensor:
    return _write_product(out, x, weight_OI)


@torch.library.custom_op("torchtitan_clone::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, x: Tensor, weight_OI: Tensor) -> None:
    """Adds x W^T to a contiguous total [..., O] in place, with the arguments of faster_linear()."""
    _write_product(total, x, weight_OI, adds=True)


def _write_product(out: Tensor, x: Tensor, weight_OI: Tensor, *, adds: bool = False) -> Tensor:
    """Writes x W^T to `out`, or adds it, and returns `out`."""
    tensors = (x, weight_OI, out)
    is_taken = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors) and out.is_contiguous()
    is_taken = is_taken and weight_OI.dim() == 2 and x.shape[-1:] == weight_OI.shape[1:]
    if not is_taken or out.shape != (*x.shape[:-1], weight_OI.shape[0]):
        found = [(t.device.type, t.dtype, tuple(t.shape), t.stride()) for t in tensors]
        rule = "use fp32 tensors of a CPU, [..., I] and [O, I], and a contiguous result [..., O]"
        raise ValueError(f"x W^T by C++ does not take {found}: {rule}")
    if out.numel() == 0 or x.shape[-1] == 0:
        return out if adds else out.zero_()
    x_NI = x.reshape(-1, x.shape[-1])
    strides = (*x_NI.stride(), *weight_OI.T.stride())
    sizes = (ctypes.c_int64 * 7)(len(x_NI), len(weight_OI), x_NI.shape[1], *strides)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x_NI, weight_OI, out)]
    loaded_library().multiply_matrices(*pointers, sizes, ctypes.c_bool(adds))
    return out


def _is_large(grad: Tensor, x: Tensor) -> bool:
    """Whether the gradient of a weight takes enough products for C++, from that of its result and its input."""
    is_large = grad.shape[-1] * x.shape[-1] >= MIN_WEIGHTS_FOR_GRAD
    return is_large and grad.numel() * x.shape[-1] >= MIN_PRODUCTS


def has_faster_grad(grad: Tensor, x: Tensor) -> bool:
    """Whether C++ computes the gradient of a weight faster than torch, from those of its result and its input."""
    return _is_large(grad, x) and _takes_cpp(grad, x)


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    grad_ON, x_NI = grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1])
    return faster_linear(grad_ON, x_NI.T) if _is_large(grad, x) else grad_ON @ x_NI


def _backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    # Pipeline schedules that split backward compute both gradients in both halves of it.
    x, weight_OI = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
    needs_x, needs_weight = cast("tuple[bool, bool]", ctx.needs_input_grad)
    x_grad = faster_linear(grad, weight_OI.T) if needs_x else None
    return x_grad, _weight_grad(grad, x) if needs_weight else None


faster_linear.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
