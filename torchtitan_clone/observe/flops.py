"""FLOPs per token of training, and the peak FLOPs per second of known devices.

Legend: N parameters in matrix products, L layers, H heads, D head dimension, T sequence length.
"""

import re
from collections.abc import Iterable

PEAK_BF16_TFLOPS = (
    # Regex over torch.cuda.get_device_name(), dense bf16 TFLOP/s; the first match wins.
    # Figures that data sheets state with sparsity only are halved.
    (r"\bA[18]00\b", 312.0),  # NVIDIA A100 and A800 data sheets; the A800 differs in NVLink only
    (r"\bH[12]00 NVL\b", 835.5),  # NVIDIA H100 and H200 data sheets, NVL column: 1,671 with sparsity
    (r"\bH100 PCIe\b", 756.0),  # NVIDIA H100 white paper, PCIe column
    (r"\b(H100|H200|GH200)\b", 989.4),  # NVIDIA H100, H200 and GH200 data sheets, SXM: 1,979 with sparsity
    (r"\bH20\b", 148.0),  # NVIDIA H20 data sheet
    (r"\bGB200\b", 2500.0),  # NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s with sparsity over 72 GPUs
    (r"\bB200\b", 2250.0),  # NVIDIA HGX B200 data sheet: 36 PFLOP/s with sparsity over 8 GPUs
    (r"\bB100\b", 1750.0),  # NVIDIA HGX B100 data sheet: 28 PFLOP/s with sparsity over 8 GPUs
    (r"\bL40S\b", 362.05),  # NVIDIA L40S data sheet
    (r"\bL4\b", 121.0),  # NVIDIA L4 data sheet: 242 with sparsity
    (r"\bA10\b", 125.0),  # NVIDIA A10 data sheet
    (r"\bRTX 4090\b(?! (D|Laptop)\b)", 165.2),  # NVIDIA Ada GPU architecture white paper, fp32 accumulation
    (r"\bMI250X\b", 191.5),  # AMD MI250X data sheet: 383 for the card, which appears as two devices
    (r"\bMI3(00|25)X\b", 1307.4),  # AMD MI300X and MI325X data sheets
)


def peak_flops_per_second(device_name: str, *, dtype: str) -> float | None:
    """Returns the peak of one device for dense products in `dtype`, from its data sheet; None if unknown or MIG."""
    if dtype != "bfloat16" or re.search(r"\bMIG\b", device_name):
        return None
    return next((tflops * 1e12 for pattern, tflops in PEAK_BF16_TFLOPS if re.search(pattern, device_name)), None)


def format_flops(flops_per_second: float) -> str:
    """Formats a speed with three digits in the unit that it reaches."""
    for unit, size in (("EFLOP/s", 1e18), ("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if flops_per_second >= 0.9995 * size:  # what rounds to 1,000 of a unit is 1 of the next
            return f"{flops_per_second / size:.3g} {unit}"
    return f"{flops_per_second / 1e3:.3g} kFLOP/s"


def training_flops_per_token(
    *, matmul_parameters: int, n_heads: int, head_dim: float, attended_tokens: Iterable[int]
) -> float:
    """Returns 6 N + 12 L H D T: forward and backward without recomputation. Source: arXiv 2204.02311, appendix B.

    `attended_tokens` has T of each layer, which a window limits. By convention the attention term is not reduced for
    other masks, so that MFU is comparable with published numbers.
    """
    return 6.0 * matmul_parameters + 12.0 * n_heads * head_dim * sum(attended_tokens)
