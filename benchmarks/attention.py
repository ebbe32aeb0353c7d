"""Measures attention by C++, which compiled blocks of a CPU use, against that of eager blocks.

    python benchmarks/cpu_attention.py
    python benchmarks/cpu_attention.py --dtype=bfloat16 --shapes 2x8x1024x128
    python benchmarks/cpu_attention.py --document-length=100
    ATEN_CPU_CAPABILITY=avx2 python benchmarks/cpu_attention.py

Shapes are rows x heads x tokens x head size. Both take turns in each round; the table has medians over the rounds, of
milliseconds forward and backward and of the ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
from torch import Tensor

from benchmarks.turns import processor_name
from torchtitan_clone.models.attention import CoreAttention, DocumentMask
from torchtitan_clone.ops.cpp_attention import attend

SHAPES = ["8x8x512x32", "4x12x512x64", "8x4x128x32", "1x8x2048x64"]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def seconds_of(attention: Attention, inputs: Sequence[Tensor], grad: Tensor, starts: Tensor | None) -> list[float]:
    """Returns how long forward and backward take."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    start = time.perf_counter()
    out = attention(q, k, v, starts)
    middle = time.perf_counter()
    out.backward(grad)
    return [middle - start, time.perf_counter() - middle]


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--document-length", type=int, help="attend within documents of this many tokens")
    parser.add_argument("--rounds", type=int, default=15)
    choices = parser.parse_args(argv)
    kernels: dict[str, Attention] = {"eager": CoreAttention(), "C++": lambda *x: attend(*x)[0]}
    print(f"{processor_name()}; {torch.backends.cpu.get_cpu_capability()}; {torch.get_num_threads()} threads")
    print(f"{choices.dtype:16}" + "".join(f"{name:>20}" for name in (*kernels, "ratio")))
    for shape in choices.shapes:
        B, N, T, H = map(int, shape.split("x"))
        *inputs, grad = torch.randn(4, B, T, N, H).to(getattr(torch, choices.dtype))
        index_BT = torch.arange(T).expand(B, T)
        documents_BT = choices.document_length and (index_BT // choices.document_length).int()
        starts_BT = DocumentMask()(documents_BT, index_BT)
        rounds = [
            {name: seconds_of(kernel, inputs, grad, starts_BT) for name, kernel in kernels.items()}
            for _ in range(choices.rounds + 1)
        ][1:]
        ms = {name: [1e3 * statistics.median(each[name][i] for each in rounds) for i in (0, 1)] for name in kernels}
        ratios = [statistics.median(each["C++"][i] / each["eager"][i] for each in rounds) for i in (0, 1)]
        print(f"{shape:16}" + "".join(f"{forward:11.1f} +{backward:7.1f}" for forward, backward in ms.values()), end="")
        print("{:12.2f} {:7.2f}".format(*ratios), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
