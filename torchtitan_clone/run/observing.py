"""Observers measure a step besides its loss: their numbers are read with those that the step reads anyway."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchtitan_clone.models.decoder import Decoder
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.run.plan import RunPlan


class Observer(Protocol):
    """Measures the steps of an engine on the device."""

    @property
    def size(self) -> int:
        """Number of values that own() returns in this step, equal on all ranks."""
        ...

    def begin_step(self, step: int, /) -> None:
        """Begins the step of this number."""
        ...

    def own(self) -> Tensor:
        """Returns this rank's summands [size] of what take() gets, after backward. A collective over all ranks."""
        ...

    def take(self, sums: Sequence[float], /) -> None:
        """Takes the sums over all ranks."""
        ...

    def before_update(self, *, grad_norm: float) -> None:
        """Is called before the optimizer, in steps that are not skipped, with the norm of the gradients."""
        ...

    def after_update(self) -> None:
        """Is called after the optimizer, in steps that are not skipped."""
        ...

    def columns(self) -> dict[str, float]:
        """Returns the columns of the last step."""
        ...


def build_observers(
    plan: RunPlan, *, mesh: Mesh, model_parts: Sequence[Decoder], device: torch.device
) -> list[Observer]:
    """Returns the observers that the options ask for."""
    observers: list[Observer] = []
    if plan.config.metrics.statistics_freq:  # first: QK-clip changes weights after the update
        from torchtitan_clone.run.statistics import Statistics

        observers.append(Statistics(plan, mesh=mesh, model_parts=model_parts, device=device))
    if plan.config.optimizer.qk_clip is not None:
        from torchtitan_clone.run.qk_clip import QKClip

        observers.append(QKClip(plan, mesh=mesh, model_parts=model_parts, device=device))
    return observers
