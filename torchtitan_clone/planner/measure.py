"""Measures the hardware table of this machine: products, attention, elementwise operations, memory and collectives."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.models.rope import rotate
from torchtitan_clone.planner.hardware import Fitted, Hardware
from torchtitan_clone.run.memory import host_memory
from torchtitan_clone.torch_compat import has_bfloat16_units

SIZES = (64, 128, 256, 512, 1024)
"""Smallest sizes of the products that are measured."""
ROWS = 2048
REPEATS = 4
MESSAGES = (1024, 16 * 2**20)
"""Bytes of the smallest and the largest collective."""


def best_seconds(function: Callable[[], object], *, device: torch.device, repeats: int = REPEATS) -> float:
    """Returns the shortest time of a call, of several after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def measure_hardware(device: torch.device, *, name: str, links: tuple[float, float]) -> Hardware:
    """Returns the table of a device; `links` are microseconds and GB/s of collectives, see measure_links()."""
    is_cpu = device.type == "cpu"
    dtype = torch.bfloat16 if not is_cpu or has_bfloat16_units() else torch.float32
    products = [[size, round(_product_tflops(size, dtype=dtype, device=device), 4)] for size in SIZES]
    memory = _memory_gbps(dtype=dtype, device=device)
    memory_bytes = host_memory() if is_cpu else torch.cuda.mem_get_info(device)[1]
    link_us, link_gbps = links
    return Hardware(
        name=name,
        sources=[f"measured by scripts/measure_hardware.py with torch {torch.__version__}, {dtype}"],
        device_type=device.type,
        memory_gib=round(memory_bytes / 2**30, 1),
        products=products,
        memory_gbps=round(memory, 2),
        operation_us=round(1e6 * best_seconds(_small_operation(device), device=device), 1),
        node_size=4096 if is_cpu else max(1, torch.cuda.device_count()),
        link_us=round(link_us, 1),
        link_gbps=round(link_gbps, 3),
        network_us=round(link_us, 1),
        network_gbps=round(link_gbps, 3),
        is_shared=is_cpu,
        fitted=Fitted(
            products=1.0,
            attention=round(_attention_tflops(dtype=dtype, device=device) / products[-1][1], 3),
            link=1.0,
            network=1.0,
            latency=1.0,
            eager_passes=round(_eager_passes(memory, dtype=dtype, device=device), 2),
        ),
    )


def _small_operation(device: torch.device) -> Callable[[], Tensor]:
    x = torch.ones(16, device=device)
    return lambda: x + 1


def _product_tflops(size: int, *, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the speed of a linear layer, forward and backward, whose input has `size` features."""
    x = torch.randn(ROWS, size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(4 * size, size, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(ROWS, 4 * size, dtype=dtype, device=device)

    def step() -> None:
        torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

    return 3 * 2 * ROWS * 4 * size**2 / best_seconds(step, device=device) / 1e12


def _attention_tflops(*, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the speed of causal attention, in forward FLOPs; its backward counts 2.5 times as many."""
    shape = (4, 8, 1024, 64)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype, device=device)

    def step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    rows, heads, tokens, features = shape
    flops = 3.5 * 4 * rows * heads * tokens * tokens / 2 * features
    return flops / best_seconds(step, device=device) / 1e12


def _memory_gbps(*, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the bandwidth of an operation that reads two large tensors and writes one."""
    x, y, out = (torch.ones(2**24, dtype=dtype, device=device) for _ in range(3))
    size = 3 * x.numel() * x.element_size()
    return size / best_seconds(lambda: torch.mul(x, y, out=out), device=device) / 1e9


def _eager_passes(memory_gbps: float, *, dtype: torch.dtype, device: torch.device) -> float:
    """Returns Fitted.eager_passes of the elementwise operations of a block: norms, rotation, SwiGLU, residual sums."""
    dim, hidden, heads = 512, 1536, 8
    x, gate, up = (
        torch.randn(4, 1024, size, dtype=dtype, device=device, requires_grad=True) for size in (dim, hidden, hidden)
    )
    weight = torch.ones(dim, dtype=dtype, device=device, requires_grad=True)
    angles = torch.randn(4, 1024, 1, dim // heads, device=device)

    def step() -> None:
        normed = F.rms_norm(x, (dim,), weight)
        rotated = rotate(normed.unflatten(-1, (heads, -1)), angles, angles).flatten(-2)
        out = x + F.rms_norm(x + rotated, (dim,), weight)
        torch.autograd.grad((out, F.silu(gate) * up), (x, weight, gate, up), (out.detach(), gate.detach()))

    # The products of such a block: queries, keys and values, outputs of attention and feed-forward, gate and up.
    results = x[..., 0].numel() * (5 * dim + 2 * hidden) * x.element_size()
    return best_seconds(step, device=device) * 1e9 * memory_gbps / (3 * results)


def measure_links() -> tuple[float, float]:
    """Returns microseconds of a message and GB/s between the ranks of the process group."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    small, large = (_sum_seconds(size, device=device) for size in MESSAGES)
    ranks = dist.get_world_size()
    received = 2 * MESSAGES[1] * (ranks - 1) / ranks
    return 1e6 * small / (2 * (ranks - 1)), received / max(large - small, 1e-9) / 1e9


def _sum_seconds(size: int, *, device: torch.device) -> float:
    tensor = torch.ones(size // 4, device=device)
    return best_seconds(lambda: dist.all_reduce(tensor), device=device, repeats=20)


def to_toml(hardware: Hardware) -> str:
    """Returns the table as text."""
    values = asdict(hardware)
    fitted = values.pop("fitted")
    lines = [f"{name} = {toml_like(value)}" for name, value in values.items()]
    return "\n".join([*lines, "", "[fitted]", *(f"{name} = {toml_like(value)}" for name, value in fitted.items()), ""])


def threads() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
