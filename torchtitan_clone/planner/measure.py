"""Measures the hardware table of this machine's GPUs: products, attention, memory and collectives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.planner.hardware import Fitted, Hardware

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Smallest sizes of the products that are measured; the largest is that of all other tensors."""
REPEATS = 5
CALLS = 10
MESSAGES = (1024, 2**28)
"""Bytes of the smallest and the largest collective."""


def best_seconds(function: Callable[[], object], *, device: torch.device, repeats: int = REPEATS) -> float:
    """Returns the shortest mean time of CALLS calls, of several times after one that is not counted."""
    seconds: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - start) / CALLS)
    return min(seconds[1:])


def measure_hardware(
    device: torch.device, *, name: str, memory_gib: float, node_size: int, links: tuple[float, float],
    sizes: Sequence[int] = SIZES, repeats: int = REPEATS,
) -> Hardware:  # fmt: skip
    """Returns the table of a device; `links` are microseconds and GB/s of collectives, see measure_links()."""

    def seconds(function: Callable[[], object]) -> float:
        return best_seconds(function, device=device, repeats=repeats)

    most, dtype = max(sizes), torch.bfloat16
    x, y, out = (torch.ones(most, most, dtype=dtype, device=device) for _ in range(3))
    # [most, size] x [size, most]
    products = [2 * most**2 * n / seconds(lambda n=n: torch.mm(x[:, :n], y[:n], out=out)) / 1e12 for n in sizes]
    # Attention is causal: half of the scores. Backward has 2.5 times the FLOPs of forward.
    shape = (2, 16, most // 2, 128)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype, device=device)

    def attend() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    rows, heads, tokens, features = shape
    attention = 3.5 * 4 * rows * heads * tokens**2 / 2 * features / seconds(attend) / 1e12
    small = torch.ones(16, device=device)
    link_us, link_gbps = (round(each, 3) for each in links)
    return Hardware(
        name=name,
        sources=[f"measured with torch {torch.__version__}, {dtype}"],
        memory_gib=round(memory_gib, 1),
        products=[[size, round(tflops, 4)] for size, tflops in zip(sizes, products, strict=True)],
        memory_gbps=round(3 * out.nbytes / seconds(lambda: torch.mul(x, y, out=out)) / 1e9, 2),
        operation_us=round(1e6 * seconds(lambda: small + 1), 1),
        node_size=node_size,
        link_us=link_us,
        link_gbps=link_gbps,
        network_us=link_us,
        network_gbps=link_gbps,
        fitted=Fitted(attention=round(attention / products[-1], 3)),
    )


def measure_links() -> tuple[float, float]:
    """Returns microseconds of a message and GB/s between the ranks of the process group."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    small, large = (_sum_seconds(size, device=device) for size in MESSAGES)
    ranks = dist.get_world_size()
    received = 2 * MESSAGES[1] * (ranks - 1) / ranks
    return 1e6 * small / (2 * (ranks - 1)), received / max(large - small, 1e-9) / 1e9


def _sum_seconds(size: int, *, device: torch.device) -> float:
    tensor = torch.ones(size // 4, device=device)
    return best_seconds(lambda: dist.all_reduce(tensor), device=device)


def to_toml(hardware: Hardware) -> str:
    """Returns the table as text."""
    values = asdict(hardware)
    fitted = values.pop("fitted")
    lines = [*values.items(), None, *fitted.items()]
    return "".join("\n[fitted]\n" if line is None else f"{line[0]} = {toml_like(line[1])}\n" for line in lines)
