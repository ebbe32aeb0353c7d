"""Kernels that replace torch's where they are faster: the package behind the door `cpu`, or none.

The functions here return that package where it is faster for these tensors, and None where torch computes.
Legend: B batch, T queries, S keys, N heads, K kv heads, H head dim; I input and O output features.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchtitan_clone import doors


class AttentionKernel(Protocol):
    """Attention over ranges of keys, in the data type of its library."""

    def attend(
        self, *inputs: Tensor | None, accumulate_into: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns what CpuKernels.attend() does; `accumulate_into` becomes attention over those and these keys."""
        ...

    def attend_backward(
        self, grad_BTNH: Tensor, *saved: Tensor | None, q_grad: Tensor | None = None, kv_grads: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Returns the gradients by queries, keys and values; adds to `q_grad`, and writes to `kv_grads`."""
        ...


class CpuKernels(Protocol):
    """What the package offers: `torchtitan_clone/cpu/door.py`."""

    KEPT: frozenset[object]
    """Operators that selective activation checkpointing keeps."""
    ALTERNATING: frozenset[object]
    """Operators of which it recomputes every second one."""

    def start(self, *, compiles_model: bool) -> None:
        """Begins to compile and load what a run uses, in threads."""

    def available(self, *, compiles_model: bool) -> list[str]:
        """Returns the names of the libraries that such a run can use here, for which it waits."""
        ...

    def leave_out(self, names: set[str], /) -> None:
        """Leaves the work of these libraries, and of no others, to torch."""

    def use_tensor_region(self) -> None:
        """Allocates large tensors in a region of memory of their own from now on."""

    def use_huge_pages(self) -> None:
        """Lets the kernel use huge pages for the region, which a run calls after its first step."""

    def has_bfloat16_units(self) -> bool:
        """Whether this processor multiplies matrices in bfloat16 without emulation."""
        ...

    def has_faster_product(self, x: Tensor, weight_OI: Tensor) -> bool: ...
    def has_faster_grad(self, grad: Tensor, x: Tensor) -> bool: ...

    def faster_linear(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Returns x W^T [..., O]."""
        ...

    def add_product_(self, total: Tensor, x: Tensor, weight_OI: Tensor) -> None:
        """Adds x W^T to a total in fp32 in place."""

    def has_faster_attention(self, q_BTNH: Tensor, *, in_eager: bool) -> bool: ...

    def attend(
        self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, starts_BT: Tensor | None, ends_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns attention of each query over keys from its start to its end: out [B, T, N, H], lse [B, N, T]."""
        ...

    def attention_kernel(self, q_BTNH: Tensor) -> AttentionKernel:
        """Returns the kernel that computes in the data type of these queries."""
        ...


CPU = cast("CpuKernels | None", doors.find("cpu"))
"""The package behind the door; None if it is closed."""


class FasterAttention(nn.Module):
    """Base of modules of attention that use the kernels in compiled blocks and, after use_kernels(), in eager training.

    Without gradients eager attention is torch's.
    """

    _in_eager = False

    def faster_attention(self, q_BTNH: Tensor) -> CpuKernels | None:
        """Returns the kernels that compute attention of these queries."""
        return CPU if CPU is not None and CPU.has_faster_attention(q_BTNH, in_eager=self._in_eager) else None


def use_kernels(model: nn.Module) -> None:
    """Lets attention of a model use the kernels in eager training; results differ by rounding."""
    for module in model.modules():
        if isinstance(module, FasterAttention):
            module._in_eager = True


def prepare(device: torch.device, *, compiles_model: bool) -> None:
    """Begins to load the kernels of a run on this device, and places its tensors: once, before a model is built."""
    if CPU is not None and device.type == "cpu":
        CPU.start(compiles_model=compiles_model)
        CPU.use_tensor_region()


def available(device: torch.device, *, compiles_model: bool) -> list[str]:
    """Returns the names of the kernels that a run can use on this device."""
    if CPU is None or device.type != "cpu":
        return []
    return CPU.available(compiles_model=compiles_model)


def leave_out(names: set[str]) -> None:
    """Leaves the work of these kernels, and of no others, to torch."""
    if CPU is not None:
        CPU.leave_out(names)


def use_huge_pages() -> None:
    """Says that the first step is done; see CpuKernels."""
    if CPU is not None:
        CPU.use_huge_pages()


def has_bfloat16_units() -> bool:
    """Whether a CPU multiplies matrices in bfloat16 without emulation; False if the door is closed."""
    return CPU is not None and CPU.has_bfloat16_units()
