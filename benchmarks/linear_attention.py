"""Measures a layer of linear attention, with its projections, against transformers' own in torch: forward and backward.

    python benchmarks/linear_attention.py
    python benchmarks/linear_attention.py --dtype=bfloat16 --rounds=7

Sizes are those of Qwen3.5-0.8B. Both take turns in one process; "peak" is what each grows a process of its own by.
The last line compares the time of a token in a row of eight times as many.
"""

import argparse
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

import torch
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.utils import logging

from benchmarks.turns import alternate, median_of, processor_name, ratio_of, timed
from tests.support.harness import collect, start_ranks
from torchtitan_clone.models.delta_net import DeltaSizes, GatedDeltaNet

SIZES = DeltaSizes(key_heads=16, value_heads=16, key=128, value=128, conv=4)
DIM = 1024


def build(name: str, *, dtype: str) -> Callable[[Tensor], Tensor]:
    """Returns a layer."""
    if name == "ours":
        layer: nn.Module = GatedDeltaNet(SIZES, dim=DIM, norm_eps=1e-6)
        layer.to(getattr(torch, dtype)).decay.float()
        return lambda x_BTD: layer(x_BTD, None, None)
    logging.set_verbosity_error()
    config = Qwen3_5TextConfig(
        hidden_size=DIM, linear_num_key_heads=SIZES.key_heads, linear_num_value_heads=SIZES.value_heads,
        linear_key_head_dim=SIZES.key, linear_value_head_dim=SIZES.value, linear_conv_kernel_dim=SIZES.conv,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0).to(getattr(torch, dtype))


def step_of(layer: Callable[[Tensor], Tensor], *, tokens: int, dtype: str) -> Callable[[], None]:
    """Returns forward and backward on a row."""
    x_BTD = torch.randn(1, tokens, DIM, dtype=getattr(torch, dtype), requires_grad=True)
    grad_BTD = torch.randn_like(x_BTD)
    return lambda: layer(x_BTD).backward(grad_BTD)


def peak_mib(name: str, choices: argparse.Namespace) -> float:
    """Returns what a step grows this process by, after one of few tokens."""
    layer = build(name, dtype=choices.dtype)
    step_of(layer, tokens=128, dtype=choices.dtype)()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step_of(layer, tokens=choices.tokens, dtype=choices.dtype)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=11)
    choices = parser.parse_args()
    layers = {name: build(name, dtype=choices.dtype) for name in ("transformers", "ours")}
    steps = {name: step_of(layer, tokens=choices.tokens, dtype=choices.dtype) for name, layer in layers.items()}
    steps["long row"] = step_of(layers["ours"], tokens=8 * choices.tokens, dtype=choices.dtype)
    take = {name: partial(lambda step: timed(step)[1], step) for name, step in steps.items()}
    alternate(take, rounds=1)
    taken = alternate(take, rounds=choices.rounds)
    peaks = {name: collect(start_ranks(peak_mib, 1, name, choices))[0] for name in layers}
    print(f"{processor_name()}; {torch.get_num_threads()} threads, {choices.dtype}")
    for name, peak in peaks.items():
        ratio = ratio_of(taken[name], taken["transformers"])
        print(f"{name:14}{1e3 * median_of(taken[name]):9.0f} ms{ratio!s:>22}{peak:9.0f} MiB")
    per_token = [{"wall": step["wall"] / 8} for step in taken["long row"]]
    print(f"time of a token, {8 * choices.tokens} to {choices.tokens} in a row: {ratio_of(per_token, taken['ours'])}")


if __name__ == "__main__":
    main()
