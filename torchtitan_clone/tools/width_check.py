"""Coordinate check: how fast activations grow with the width of a model, after each of some steps on one batch.

Source: arXiv 2203.03466, appendix D.1.
"""

import math
import re
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from torchtitan_clone.config import Config
from torchtitan_clone.data.packing import Batch
from torchtitan_clone.parallel.apply import named_modules
from torchtitan_clone.run import preflight
from torchtitan_clone.run.engine import StepTotals, build_engine

WIDTHS, STEPS = (1, 2, 4, 8), 5
MEASURED = re.compile(r"layers\.\d+|norm")
WIDE = ("dim", "n_heads", "n_kv_heads", "hidden_dim")
Sizes = list[dict[str, float]]
"""Root mean squares of the results of modules, before each step and after the last."""


def widened(config: Config, factor: int) -> Config:
    """Returns the configuration with a wider model, on one rank of a CPU."""
    args = preflight.resolve(config, world_size=1, device_type="cpu").model_args
    wide = {name: value * factor for name in WIDE if (value := getattr(args, name, None)) is not None}
    return replace(config, model=replace(config.model, args={**config.model.args, **wide}))


def measure(config: Config) -> Sizes:
    """Trains some steps on one batch of random tokens; needs a process group."""
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    engine = build_engine(plan, device=torch.device("cpu"))
    shape = (config.training.local_batch_size, config.training.seq_len + 1)
    tokens = torch.randint(plan.model_args.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(shape[1] - 1).repeat(shape[0], 1)
    batch = Batch(
        tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:], positions_BT=positions,
        documents_BT=torch.zeros_like(positions, dtype=torch.int32), num_targets=positions.numel(),
    )  # fmt: skip
    sizes: Sizes = []
    for name, module in named_modules(engine.model_parts).items():
        if MEASURED.fullmatch(name):
            module.register_forward_hook(partial(_record, sizes, name))
    for step in range(1, STEPS + 2):
        sizes.append({})
        engine.begin_step(step)
        engine.forward_backward([batch], num_targets=batch.num_targets)
        totals = StepTotals(loss=0.0, auxiliary={}, loads={}, by_source={})
        engine.optimizer_step(totals, grad_norm=engine.gradient_norm().item())
        engine.optimizer.zero_grad()
    return sizes


def _record(sizes: Sizes, name: str, _module: object, _inputs: object, out: object) -> None:
    """Keeps the size of a result, of which auxiliary terms are the second part."""
    hidden = out if isinstance(out, torch.Tensor) else cast("tuple[torch.Tensor, ...]", out)[0]
    sizes[-1][name] = hidden.detach().float().square().mean().sqrt().item()


def slope(sizes: list[float]) -> float:
    """Returns the slope of the line through the logarithms of sizes by that of the width."""
    x, y = ([math.log(each) for each in values] for values in (WIDTHS, sizes))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = [(a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)]
    return sum(products) / sum((a - mean_x) ** 2 for a in x)


def slopes(config: Config) -> list[dict[str, float]]:
    """Returns the slope of each module before each step and after the last."""
    measured = [measure(widened(config, factor)) for factor in WIDTHS]
    return [
        {name: slope([each[step][name] for each in measured]) for name in measured[0][0]} for step in range(STEPS + 1)
    ]
