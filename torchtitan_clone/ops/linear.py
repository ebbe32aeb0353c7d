"""Linear layers whose products a CPU computes by the faster of torch's two libraries, MKL or oneDNN.

MKL has no kernels with AVX-512 for processors of AMD; oneDNN has. Legend: N rows, I input and O output features.
"""

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad, share_of_sum
from torchtitan_clone.torch_compat import onednn_linear


@cache
def _has_faster_onednn() -> bool:
    """Whether MKL computes in fp32 without the AVX-512 that this processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()
    available = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return is_amd and available and torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_eager_fp32(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors of a CPU, outside torch.compile and autocast."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 for x in tensors)
    return plain and tensors[0].device.type == "cpu"


def is_for_onednn(*matrices: Tensor) -> bool:
    """Whether oneDNN multiplies these matrices faster than what torch calls."""
    return is_eager_fp32(*matrices) and _has_faster_onednn()


class _OneDNNLinear(torch.autograd.Function):
    """x W^T. Pipeline schedules that split backward compute both gradients in both halves of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return onednn_linear(x, weight_OI)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        x, weight_OI = ctx.saved_tensors
        (grad,) = grad_outputs
        x_grad = onednn_linear(grad, weight_OI.T) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None
        # MKL is faster for this product over many rows: oneDNN would copy both matrices transposed.
        return x_grad, grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class Linear(nn.Linear):
    """nn.Linear. Without gradients it returns what F.linear does, which with gradients may differ by rounding.

    Of a weight that is a DTensor each rank computes with its shard, if the input is a plain tensor.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor) and not isinstance(input, DTensor):
            weight, bias = local_with_partial_grad(weight), None if bias is None else share_of_sum(bias)
        if not (torch.is_grad_enabled() and is_for_onednn(input, weight)):
            return F.linear(input, weight, bias)
        out = _OneDNNLinear.apply(input, weight)
        return out if bias is None else out + bias
