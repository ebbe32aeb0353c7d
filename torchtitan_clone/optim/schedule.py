"""Learning rate as a pure function of the step: warm-up, stable, decay. Source: arXiv 2404.06395 (WSD)."""

import math
from collections.abc import Callable

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import shown
from torchtitan_clone.config.schema import LRScheduler

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Factors of the learning rate, from 1 to 0, by the progress of the decay, from 0 to 1."""


def find_schedule_errors(lr_scheduler: LRScheduler) -> list[str]:
    """Returns a message if SCHEDULES lacks the decay."""
    if lr_scheduler.decay_type in SCHEDULES:
        return []
    return [f"lr_scheduler.decay_type = {shown(lr_scheduler.decay_type)}: no such shape; known: {', '.join(SCHEDULES)}"]


def build_schedule(lr_scheduler: LRScheduler, *, steps: int) -> Callable[[int], float]:
    """Returns factor(step), which scales optimizer.lr; ConfigError for an unknown decay.

    Args:
        lr_scheduler: options of the schedule.
        steps: number of steps of the run, which total_steps overrides.
    """
    if errors := find_schedule_errors(lr_scheduler):
        raise ConfigError(errors)
    shape = SCHEDULES[lr_scheduler.decay_type]
    steps = lr_scheduler.total_steps or steps
    warmup = min(lr_scheduler.warmup_steps, steps)
    lowest = lr_scheduler.min_lr_factor
    decay = steps - warmup
    if lr_scheduler.decay_ratio is not None:
        decay = min(round(steps * lr_scheduler.decay_ratio), decay)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        # The first step of the decay has the full rate, so that the last one does not have a rate of zero.
        progress = max(0, step - 1 - (steps - decay)) / max(1, decay)
        return lowest + (1 - lowest) * shape(min(1.0, progress))

    return factor
