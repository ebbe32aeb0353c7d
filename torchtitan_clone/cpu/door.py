"""What the core finds here: `ops.kernels.CpuKernels` and `comm.collectives.Transport`."""

import torch

from torchtitan_clone.cpu.attention import HEAD_MULTIPLES, IS_FASTER_IN_EAGER
from torchtitan_clone.cpu.attention import OVER_KEYS as OVER_KEYS
from torchtitan_clone.cpu.attention import attend as attend
from torchtitan_clone.cpu.attention import has_faster_attention as has_faster_attention
from torchtitan_clone.cpu.attention import preferred_attention as preferred_attention
from torchtitan_clone.cpu.attention import use_attention as use_attention
from torchtitan_clone.cpu.library import leave_out as leave_out
from torchtitan_clone.cpu.library import loaded_names, start_compiling
from torchtitan_clone.cpu.products import add_product_ as add_product_
from torchtitan_clone.cpu.products import faster_linear as faster_linear
from torchtitan_clone.cpu.products import has_faster_grad as has_faster_grad
from torchtitan_clone.cpu.products import has_faster_product as has_faster_product
from torchtitan_clone.cpu.shared_memory import MOST_BYTES_AT_ONCE as MOST_BYTES_AT_ONCE
from torchtitan_clone.cpu.shared_memory import close_streams as close_streams
from torchtitan_clone.cpu.shared_memory import connect as connect
from torchtitan_clone.cpu.shared_memory import streams_of as streams_of
from torchtitan_clone.cpu.shared_memory import wait_for as wait_for
from torchtitan_clone.cpu.tensor_region import use_huge_pages as use_huge_pages
from torchtitan_clone.cpu.tensor_region import use_tensor_region as use_tensor_region
from torchtitan_clone.cpu.torch_compat import has_bfloat16_units as has_bfloat16_units

KEPT = frozenset({torch.ops.torchtitan_clone.attend.default})
ALTERNATING = frozenset({torch.ops.torchtitan_clone.faster_linear.default})


def start(*, compiles_model: bool) -> None:
    """Begins to compile and load the libraries in threads, if training uses them on this processor."""
    if compiles_model or IS_FASTER_IN_EAGER:
        start_compiling()


def available(*, compiles_model: bool) -> dict[str, int]:
    """Returns the libraries that are loaded, if training uses them, with their multiples; waits for them."""
    names = loaded_names() if compiles_model or IS_FASTER_IN_EAGER else []
    return {name: HEAD_MULTIPLES[name] for name in names}
