"""Learning rate as a pure function of the step: warm-up, stable, decay. Source: arXiv 2404.06395 (WSD)."""

import math
from collections.abc import Callable

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import LRScheduler

# Each maps how much of the decay lies behind, from 0 to 1, to what remains of the learning rate, from 1 to 0.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


def build_schedule(lr_scheduler: LRScheduler, *, steps: int) -> Callable[[int], float]:
    """Returns factor(step): the share of optimizer.lr that step 1, 2, ... of `steps` uses.

    ConfigError for an unknown `decay_type`.
    """
    if lr_scheduler.decay_type not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ConfigError([f'lr_scheduler.decay_type = "{lr_scheduler.decay_type}": no such shape; known: {known}'])
    shape = SCHEDULES[lr_scheduler.decay_type]
    warmup, lowest = lr_scheduler.warmup_steps, lr_scheduler.min_lr_factor
    longest_decay = steps - warmup
    decay = longest_decay
    if lr_scheduler.decay_ratio is not None:
        decay = min(round(steps * lr_scheduler.decay_ratio), longest_decay)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        # The first step of the decay is still whole, so that the last one is not wasted at a rate of zero.
        progress = max(0, step - 1 - (steps - decay)) / max(1, decay)
        return lowest + (1 - lowest) * shape(min(1.0, progress))

    return factor
