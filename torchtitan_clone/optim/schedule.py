"""Learning rate, weight decay and momentum as pure functions of the step.

Source of the learning rate, warm-up, stable, decay: arXiv 2404.06395 (WSD).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import describe_group, find_unknown_decay
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema_training import MAX_STEPS, LRScheduler, OptimizerGroup


def _inverse_sqrt(progress: float, *, start: int, steps: int) -> float:
    """Returns sqrt(start / step), where the decay of so many steps begins after step `start`."""
    start = max(1, start)
    return math.sqrt(start / (start + progress * steps))


SCHEDULES: dict[str, Callable[..., float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "inverse_sqrt": _inverse_sqrt,
}
"""Factors of the learning rate, from 1 to 0, by the progress of the decay, from 0 to 1; one also by its steps."""


MAX_FACTOR = 1_000_000


def find_schedule_errors(lr_scheduler: LRScheduler, groups: Sequence[OptimizerGroup] = ()) -> list[str]:
    """Returns a message if SCHEDULES lacks the decay, and one for the first point of each list that is out of order."""
    found = list(find_unknown_decay(lr_scheduler, known=SCHEDULES))
    found += _wrong_point("lr_scheduler.points", lr_scheduler.points, largest=MAX_FACTOR)
    found += _wrong_point("lr_scheduler.weight_decay_points", lr_scheduler.weight_decay_points, largest=MAX_FACTOR)
    found += _wrong_point("lr_scheduler.momentum_points", lr_scheduler.momentum_points, largest=1)
    for group in groups:
        found += _wrong_point(f"{describe_group(group)}: lr_points", group.lr_points, largest=MAX_FACTOR)
    return found


def _wrong_point(option: str, points: list[list[float]], *, largest: int) -> list[str]:
    last = -1.0
    for point in points:
        if len(point) != 2 or not last < point[0] <= MAX_STEPS or not 0 <= point[1] <= largest:
            steps = f"above {last:.15g}" if last >= 0 else "of at least 0"
            rule = f"must be [step, factor] with a step {steps} and a factor from 0 to {largest:,}"
            return [f"{option}, {shown(point)}: {rule}; list the points in order of their steps."]
        last = point[0]
    return []


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What the settings of every param group are multiplied by in a step."""

    lr: float
    weight_decay: float = 1.0
    momentum: float = 1.0
    lr_of_groups: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further factor of the learning rate by the pattern of a group that has one."""


SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""Settings of a param group, by torch's names, that schedules change; the group has each as "initial_..." too."""


def scale_settings(param_group: dict[str, Any], factors: Factors) -> None:
    """Sets the settings of a param group for a step; of "betas" the first one is the momentum."""
    param_group["lr"] = param_group["initial_lr"] * factors.lr
    if (weight_decay := param_group.get("initial_weight_decay")) is not None:
        param_group["weight_decay"] = weight_decay * factors.weight_decay
    if (momentum := param_group.get("initial_momentum")) is not None:
        param_group["momentum"] = momentum * factors.momentum
    if (betas := param_group.get("initial_betas")) is not None:
        param_group["betas"] = (betas[0] * factors.momentum, *betas[1:])


def build_factors(
    lr_scheduler: LRScheduler, *, steps: int, groups: Sequence[OptimizerGroup] = ()
) -> Callable[[int], Factors]:
    """Returns factors(step) of all settings; ConfigError as build_schedule()."""
    lr = build_schedule(lr_scheduler, steps=steps)
    weight_decay, momentum = (
        partial(_interpolated, points=points or [[0, 1.0]])
        for points in (lr_scheduler.weight_decay_points, lr_scheduler.momentum_points)
    )
    points = {group.pattern: group.lr_points for group in groups if group.lr_points}
    return lambda step: Factors(
        lr=lr(step),
        weight_decay=weight_decay(step),
        momentum=momentum(step),
        lr_of_groups={pattern: _interpolated(step, points=each) for pattern, each in points.items()},
    )


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

    is_endless = shape is _inverse_sqrt
    if is_endless:
        shape = partial(shape, start=steps - decay, steps=decay)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        # The first step of the decay has the full rate, so that the last one does not have a rate of zero.
        progress = max(0, step - 1 - (steps - decay)) / decay if decay else 0.0
        value = shape(min(1.0, progress))
        return max(lowest, value) if is_endless else lowest + (1 - lowest) * value

    return factor


def _interpolated(step: int, *, points: list[list[float]]) -> float:
    for (start, low), (end, high) in pairwise(points):
        if start <= step < end:
            return low + (high - low) * (step - start) / (end - start)
    return points[0][1] if step < points[0][0] else points[-1][1]
