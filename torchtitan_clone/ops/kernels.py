"""Kernels that replace torch's where they are faster: the package behind the door `cpu`, or none.

The functions here return that package where it is faster for these tensors, and None where torch computes.
Legend: B batch, T queries, S keys, N heads, K kv heads, H head dim; I input and O output features.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from torchtitan_clone import doors
from torchtitan_clone.ops.varlen_attention import QKV, Attention, Queries, Spans


class PartialKernel(Protocol):
    """Attention over some keys of a row after others, whose results it merges in fp32.

    Context parallelism calls it for the keys of one rank after another.
    """

    takes_whole_rows: bool
    """Whether it is faster with the gathered keys of all ranks in the order of their rows."""

    def attend(self, qkv: QKV, *, queries: Queries, keys: Spans, merge_into: Attention | None) -> Attention:
        """Returns out [B, T, N, H] and lse [B, T, N] in fp32 over these keys and those of `merge_into`, in place."""
        ...

    def attend_backward(
        self, grad_BTNH: Tensor, qkv: QKV, attention: Attention, *, queries: Queries, keys: Spans,
        q_grad: Tensor | None, kv_grads: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Returns the gradient with respect to queries, added to `q_grad`; writes those to keys and values.

        All are in fp32; `attention` is that over all keys.
        """
        ...


class CpuKernels(Protocol):
    """What the package offers: `torchtitan_clone/cpu/door.py`."""

    KEPT: frozenset[object]
    """Operators that selective activation checkpointing keeps."""
    ALTERNATING: frozenset[object]
    """Operators of which it recomputes every second one."""

    def start(self, *, compiles_model: bool) -> None:
        """Begins to compile and load what a run uses, in threads."""

    def available(self, *, compiles_model: bool) -> dict[str, int]:
        """Returns the libraries that such a run can use here, for which it waits.

        Each with the number that must divide the features of a head for its attention.
        """
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

    def has_faster_attention(self, dtype: torch.dtype, *, head_dim: int, in_eager: bool) -> bool: ...

    def attend(
        self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, starts_BT: Tensor | None, ends_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns attention of each query over keys from its start to its end: out [B, T, N, H], lse [B, N, T]."""
        ...

    OVER_KEYS: PartialKernel
    """The same over some keys after others."""

    def preferred_attention(self, dtype: torch.dtype, *, is_compiled: bool) -> str:
        """Returns the library whose attention is the fastest on this processor, or TORCH."""
        ...

    def use_attention(self, dtype: torch.dtype, *, library: str, multiple: int) -> None:
        """Computes attention in a data type by this library, or TORCH, in heads of multiples of so many features."""


TORCH = "torch"
"""Stands for torch's own kernels among names of libraries."""
CPU = cast("CpuKernels | None", doors.find("cpu"))
"""The package behind the door; None if it is closed."""


def prepare(device: torch.device, *, compiles_model: bool) -> None:
    """Begins to load the kernels of a run on this device, and places its tensors: once, before a model is built."""
    if CPU is not None and device.type == "cpu":
        CPU.start(compiles_model=compiles_model)
        CPU.use_tensor_region()


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


def use_attention(dtype: torch.dtype, *, library: str, multiple: int) -> None:
    """Computes attention in a data type by the library on which all ranks have agreed; see CpuKernels."""
    if CPU is not None:
        CPU.use_attention(dtype, library=library, multiple=multiple)
