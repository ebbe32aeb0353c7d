"""Measures a step of Muon on one rank and on two that share the parameters, against a step of AdamW and bare products.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --layers=2 --dim=256 --rounds=5 --dtype=float32

Parameters are the matrices of Llama layers. "products" are those of Muon's iterations alone; "apart from them" is
Muon's step less its products, as a ratio to AdamW's step. On two ranks each has half of the threads: "alone" is a
rank's step with all parameters while the other takes the same, "shared" the step with FSDP's shards (shard 2).
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.turns import Step, alternate, median_of, processor_name, ratio_of, timed
from tests.support.harness import collect, start_ranks
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.ops.orthogonalize import iterate
from torchtitan_clone.optim import build_optimizer
from torchtitan_clone.parallel.runtime import Launch, process_group


def shapes_of(*, layers: int, dim: int) -> list[tuple[int, int]]:
    """Returns rows and columns of each matrix: four of attention and three of the feed-forward layer."""
    hidden = 256 * -(-8 * dim // (3 * 256))
    return layers * [*4 * [(dim, dim)], (hidden, dim), (hidden, dim), (dim, hidden)]


def build_step(name: str, matrices: list[Tensor], *, dtype: str) -> Callable[[], None]:
    """Returns a step of the optimizer on parameters with gradients."""
    parameters = {f"layers.{index}.weight": nn.Parameter(matrix) for index, matrix in enumerate(matrices)}
    args: dict[str, object] = {"dtype": dtype} if name == "Muon" else {}
    optimizer = build_optimizer(Optimizer(name=name, args=args), named_parameters=parameters)

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = gradients.setdefault(parameter, torch.ones_like(parameter))
        optimizer.step()

    gradients: dict[nn.Parameter, Tensor] = {}
    return step


def products(shapes: list[tuple[int, int]], *, dtype: str) -> Callable[[], None]:
    """Returns the iterations for all matrices, those of one shape at once as Muon has them."""
    stacks = [torch.randn(len([*same]), *sorted(shape), dtype=getattr(torch, dtype)) for shape, same in groupby(shapes)]

    def step() -> None:
        for stack in stacks:
            iterate(stack * 1e-3, coefficients="quintic", iterations=5)

    return step


def measure(steps: Mapping[str, Callable[[], None]], *, rounds: int) -> dict[str, list[Step]]:
    """Takes the steps in turn; ranks begin each at once, and each takes until all have ended it."""

    def take(step: Callable[[], None]) -> Step:
        if dist.is_initialized():
            dist.barrier()
            return timed(lambda: (step(), dist.barrier()))[1]
        return timed(step)[1]

    alternate({name: partial(take, step) for name, step in steps.items()}, rounds=2)
    return alternate({name: partial(take, step) for name, step in steps.items()}, rounds=rounds)


def on_two_ranks(choices: argparse.Namespace) -> dict[str, list[Step]]:
    """Measures a rank of two."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        matrices = [torch.randn(shape) for shape in shapes_of(layers=choices.layers, dim=choices.dim)]
        shards = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in matrices]
        names = {"alone": matrices, "shared": shards}
        steps = {name: build_step("Muon", each, dtype=choices.dtype) for name, each in names.items()}
        return measure(steps, rounds=choices.rounds)


def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=15)
    choices = parser.parse_args()
    shapes = shapes_of(layers=choices.layers, dim=choices.dim)
    steps = {each: build_step(each, [*map(torch.randn, shapes)], dtype=choices.dtype) for each in ("AdamW", "Muon")}
    one = measure({**steps, "products": products(shapes, dtype=choices.dtype)}, rounds=choices.rounds)
    print(processor_name())
    for name, taken in one.items():
        print(f"{name:12}{median_of(taken) * 1e3:10.1f} ms")
    rest = [{"wall": muon["wall"] - own["wall"]} for muon, own in zip(one["Muon"], one["products"], strict=True)]
    print(f"apart from them, of AdamW's: {ratio_of(rest, one['AdamW'])}")
    two = collect(start_ranks(on_two_ranks, 2, choices))[0]
    print(f"on two ranks, shared to alone: {ratio_of(two['shared'], two['alone'])}")


if __name__ == "__main__":
    main()
