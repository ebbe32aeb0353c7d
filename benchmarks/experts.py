"""Measures a layer of experts, and its parts, against its bare grouped products: forward and backward of one rank.

    python benchmarks/experts.py
    python benchmarks/experts.py --device=cuda --dtype=bfloat16 --tokens=16384

Layer and products process the same rows, of which each expert has equally many, in turn in one process. The parts are
the router; the sort, which brings the rows into the order of the experts; the products; and the combination of the
results. Medians over the rounds; the ratio is the median of each round's.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
from torch import Tensor

from benchmarks.turns import alternate, median_of, processor_name, ratio_of, timed
from torchtitan_clone.models.moe import MoE, MoEArgs, combine, dispatch, force_load_balance

Step = Callable[[], None]


def forward_and_backward(function: Callable[[], Tensor]) -> Step:
    """Returns a step that runs the function, and its backward with a gradient of ones."""
    grad = torch.ones_like(function().detach())
    return lambda: function().backward(grad)


def build_steps(choices: argparse.Namespace) -> dict[str, Step]:
    """Returns the layer, its parts and the bare products, by name."""
    device, dtype = torch.device(choices.device), getattr(torch, choices.dtype)
    torch.manual_seed(0)
    args = MoEArgs(num_experts=choices.experts, top_k=choices.top_k, hidden_dim=choices.hidden)
    layer = MoE(args, dim=choices.dim).to(device, dtype)
    layer.router.float()
    force_load_balance(layer)
    x_BTD = torch.randn(1, choices.tokens, choices.dim, device=device, dtype=dtype, requires_grad=True)
    scores_BTK, experts_BTK, _ = (value if value is None else value.detach() for value in layer.router(x_BTD))
    assert scores_BTK is not None
    assert experts_BTK is not None
    x_ND = x_BTD.detach().flatten(0, 1).requires_grad_()
    experts_NK = experts_BTK.flatten(0, 1)
    scores_NK = scores_BTK.flatten(0, 1).requires_grad_()
    rows, counts_E, positions_NK = dispatch(x_ND, experts_NK, num_experts=choices.experts)
    sorted_rows = rows.detach().requires_grad_()
    results = torch.randn_like(sorted_rows).requires_grad_()
    return {
        "layer": forward_and_backward(lambda: cast("Tensor", layer(x_BTD))),
        "products": forward_and_backward(lambda: layer.experts._by_expert(sorted_rows, counts_E)),
        "router": forward_and_backward(lambda: layer.router(x_BTD)[0]),
        "sort": forward_and_backward(lambda: dispatch(x_ND, experts_NK, num_experts=choices.experts)[0]),
        "combine": forward_and_backward(lambda: combine(results, scores_NK, positions_NK)),
    }


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    choices = parser.parse_args(argv)
    steps = build_steps(choices)
    taken = alternate({name: lambda step=step: timed(step)[1] for name, step in steps.items()}, rounds=choices.rounds)
    print(processor_name())
    print(f"{'part':10}{'ms':>10}{'of products':>14}")
    for name, of_part in taken.items():
        print(f"{name:10}{median_of(of_part) * 1e3:10.1f}{ratio_of(of_part, taken['products']).median:14.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
