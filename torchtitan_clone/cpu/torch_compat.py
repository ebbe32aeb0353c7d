"""What torch knows of the processor, by names that are not public."""

import platform

import torch

HAS_AMX = torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported()
"""Whether this processor multiplies matrices in bfloat16 by AMX; get_capabilities() is new in 2.12."""


def has_bfloat16_units() -> bool:
    """Whether this processor multiplies matrices in bfloat16 without emulation."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    x86 = platform.machine().lower() in ("x86_64", "amd64")  # oneDNN also emulates bfloat16 with AVX-512
    return not x86 or torch.cpu._is_avx512_bf16_supported() or HAS_AMX
