"""The loop one would write by hand: no framework, whole logits, autocast for bf16; compared by benchmarks/trainer.py.

It trains the same model from the same initial weights on the same batches with the same optimizer and schedule as
`python -m torchtitan_clone.train` does for the same options, and prints one JSON line a step.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from torchtitan_clone.config import load_config
from torchtitan_clone.optim.schedule import build_schedule
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.runtime import Launch, pick_device
from torchtitan_clone.run import preflight


def build_plain_step(argv: list[str]) -> Callable[[int], float]:
    """A function that trains the step of this number and returns its loss."""
    config = load_config(argv)
    launch = Launch.from_environment()
    device = pick_device(launch)
    plan = preflight.resolve(config, world_size=1, device_type=device.type)
    loader = preflight.prepare(plan, launch=launch).loader

    with torch.device(device):
        model = plan.spec.build(plan.model_args)
    init_weights(
        dict(model.named_parameters()),
        seed=config.debug.seed,
        std_of=lambda name: plan.spec.initial_std(plan.model_args, name),
    )
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    lr_factor = build_schedule(config.lr_scheduler, steps=config.training.steps)
    forward = torch.compile(model) if config.compile.enable else model
    dtype = getattr(torch, config.training.mixed_precision_param)

    def train_step(step: int) -> float:
        batch = next(loader).to(device)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * lr_factor(step)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = forward(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return train_step


def main(argv: list[str]) -> None:
    """Trains `training.steps` steps of the configuration in the arguments."""
    train_step = build_plain_step(argv)
    for step in range(1, load_config(argv).training.steps + 1):
        start = time.perf_counter()
        loss = train_step(step)
        row = {"step": step, "loss": loss, "step_seconds": time.perf_counter() - start, "time": time.time()}
        if torch.cuda.is_available():
            row["memory_gib"] = torch.cuda.max_memory_reserved() / 2**30
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
