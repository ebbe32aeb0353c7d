"""Measures attention: on a CPU that of torch and the C++ of training, on a GPU what runs use and FlexAttention.

    python benchmarks/attention.py
    python benchmarks/attention.py --dtype=bfloat16 --shapes 2x8x1024x128
    python benchmarks/attention.py --document-length=100
    python benchmarks/attention.py --device=cuda --dtype=bfloat16 --document-length=4096
    ATEN_CPU_CAPABILITY=avx2 python benchmarks/attention.py

Shapes are rows x heads x tokens x head size. Both take turns in each round; the table has medians over the rounds, of
milliseconds forward and backward and of the second kernel's time over the first's.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
from torch import Tensor

from benchmarks.turns import Step, alternate, median_of, processor_name, ratio_of, timed
from torchtitan_clone.cpu.attention import attend
from torchtitan_clone.cpu.library import is_loaded
from torchtitan_clone.models.attention import CoreAttention, DocumentMask
from torchtitan_clone.ops.attention import block_mask, visible_starts

SHAPES = {
    "cpu": ["8x8x512x32", "4x12x512x64", "8x4x128x32", "1x8x2048x64"],
    "cuda": ["4x32x2048x128", "1x32x8192x128", "1x32x65536x128"],
}
CLOCKS = ("forward", "backward")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernels_of(documents_BT: Tensor | None, index_BT: Tensor, dtype: torch.dtype) -> dict[str, Attention]:
    """Returns the kernels of a device for rows of these documents."""
    core, mask = CoreAttention(), DocumentMask()(documents_BT, index_BT, dtype=dtype)
    kernels: dict[str, Attention] = {"torch" if index_BT.device.type == "cpu" else "chosen": lambda *x: core(*x, mask)}
    starts_BT = visible_starts(documents_BT, like=index_BT, window=None, chunk=None)
    if index_BT.device.type == "cpu":
        return kernels | {"C++": lambda *x: attend(*x, starts_BT)[0]}
    blocks = block_mask(torch.zeros_like(index_BT) if starts_BT is None else starts_BT)
    return kernels | {"FlexAttention": lambda *x: core(*x, blocks)}


def step_of(attention: Attention, inputs: Sequence[Tensor], grad: Tensor) -> Step:
    """Returns how long forward and backward take."""
    qkv = [x.detach().requires_grad_() for x in inputs]
    out, forward = timed(lambda: attention(*qkv))
    _, backward = timed(lambda: out.backward(grad))
    return {"forward": forward["wall"], "backward": backward["wall"]}


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", help="default: those of small models on a CPU, of large ones on a GPU")
    parser.add_argument("--document-length", type=int, help="attend within documents of this many tokens")
    parser.add_argument("--rounds", type=int, default=15)
    choices = parser.parse_args(argv)
    if choices.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    if choices.device == "cpu" and not is_loaded():
        parser.error("the C++ that is compared was not compiled; the warning above says why")
    print(f"{processor_name()}; {torch.backends.cpu.get_cpu_capability()}; {torch.get_num_threads()} threads")
    dtype, head = getattr(torch, choices.dtype), f"{choices.dtype:16}"
    for shape in choices.shapes or SHAPES[choices.device]:
        B, N, T, H = map(int, shape.split("x"))
        *inputs, grad = torch.randn(4, B, T, N, H, device=choices.device).to(dtype)
        index_BT = torch.arange(T, device=choices.device).expand(B, T)
        documents_BT = choices.document_length and (index_BT // choices.document_length).int()
        kernels = kernels_of(documents_BT, index_BT, dtype)
        steps = {name: partial(step_of, kernel, inputs, grad) for name, kernel in kernels.items()}
        alternate(steps, rounds=1)  # warms up
        taken = alternate(steps, rounds=choices.rounds)
        ms = {name: [1e3 * median_of(taken[name], clock=clock) for clock in CLOCKS] for name in kernels}
        first, second = kernels
        ratios = [ratio_of(taken[second], taken[first], clock=clock).median for clock in CLOCKS]
        if head:
            print(head + "".join(f"{name:>20}" for name in (*kernels, "ratio")))
            head = ""
        print(f"{shape:16}" + "".join(f"{forward:11.1f} +{backward:7.1f}" for forward, backward in ms.values()), end="")
        print("{:12.2f} {:7.2f}".format(*ratios), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
