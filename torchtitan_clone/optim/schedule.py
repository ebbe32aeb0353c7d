"""Learning rate as a pure function of the step: warm-up, stable, decay. Source: arXiv 2404.06395 (WSD)."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import find_unknown_decay
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema_training import MAX_STEPS, LRScheduler

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Factors of the learning rate, from 1 to 0, by the progress of the decay, from 0 to 1."""


MAX_FACTOR = 1_000_000


def find_schedule_errors(lr_scheduler: LRScheduler) -> list[str]:
    """Returns a message if SCHEDULES lacks the decay, and one for the first point that is out of order."""
    found = list(find_unknown_decay(lr_scheduler, known=SCHEDULES))
    last = -1.0
    for point in lr_scheduler.points:
        if len(point) != 2 or not last < point[0] <= MAX_STEPS or not 0 <= point[1] <= MAX_FACTOR:
            steps = f"above {last:.15g}" if last >= 0 else "of at least 0"
            rule = f"must be [step, factor] with a step {steps} and a factor from 0 to {MAX_FACTOR:,}"
            return [*found, f"lr_scheduler.points, {shown(point)}: {rule}; list the points in order of their steps."]
        last = point[0]
    return found


def build_schedule(lr_scheduler: LRScheduler, *, steps: int) -> Callable[[int], float]:
    """Returns factor(step), which scales optimizer.lr; ConfigError for an unknown decay or points out of order.

    Args:
        lr_scheduler: options of the schedule.
        steps: number of steps of the run, which total_steps overrides.
    """
    if errors := find_schedule_errors(lr_scheduler):
        raise ConfigError(errors)
    if lr_scheduler.points:
        return partial(_interpolated, points=lr_scheduler.points)
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
        progress = max(0, step - 1 - (steps - decay)) / decay if decay else 0.0
        return lowest + (1 - lowest) * shape(min(1.0, progress))

    return factor


def _interpolated(step: int, *, points: list[list[float]]) -> float:
    for (start, low), (end, high) in pairwise(points):
        if start <= step < end:
            return low + (high - low) * (step - start) / (end - start)
    return points[0][1] if step < points[0][0] else points[-1][1]
