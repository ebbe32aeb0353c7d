"""Steps whose loss or gradient norm is far above those before them, which a run may skip.

The values are those of the whole global batch, after the sums over ranks and replica groups: all decide alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_clone.config.schema import Training

MIN_RELATIVE_DEVIATION = 1e-3
"""Least standard deviation over the mean: where values hardly differ, rounding is no spike."""


@dataclass(frozen=True, kw_only=True)
class SpikeWindow:
    """The losses and gradient norms of the last steps that were no spikes, oldest first, in one stage of the data."""

    stage: int = 0
    in_a_row: int = 0
    """Spikes since the last step that was none."""
    first_step: int = 0
    """The first of these steps."""
    losses: Sequence[float] = field(default_factory=tuple[float, ...])
    grad_norms: Sequence[float] = field(default_factory=tuple[float, ...])

    def find_spike(self, *, loss: float, grad_norm: float, options: Training) -> str | None:
        """Returns what is far above the window, with its mean and deviation; None if nothing is.

        Nothing is before the window is half full. Source: OLMo-core's rule of skipped steps.
        """
        if len(self.losses) < options.spike_window // 2:
            return None
        for name, value, window in (("loss", loss, self.losses), ("gradient norm", grad_norm, self.grad_norms)):
            mean = math.fsum(window) / len(window)
            variance = math.fsum((each - mean) ** 2 for each in window) / (len(window) - 1)
            deviation = max(math.sqrt(variance), MIN_RELATIVE_DEVIATION * abs(mean))
            if value - mean > options.spike_sigma * deviation:
                return (
                    f"{name} {value:.4g}, mean {mean:.4g} and standard deviation {deviation:.2g} of {len(window)} steps"
                )
        return None

    def after(self, step: int, *, loss: float, grad_norm: float, is_spike: bool, options: Training) -> "SpikeWindow":
        """Returns the window after a step. After `spike_patience` spikes in a row their level counts as the new one."""
        if is_spike and self.in_a_row + 1 < options.spike_patience:
            return replace(self, in_a_row=self.in_a_row + 1, first_step=self.first_step or step)
        before = SpikeWindow() if is_spike else self
        return SpikeWindow(
            stage=self.stage,
            losses=(*before.losses, loss)[-options.spike_window :],
            grad_norms=(*before.grad_norms, grad_norm)[-options.spike_window :],
        )

    def in_stage(self, stage: int) -> "SpikeWindow":
        """Returns the window at a step of this stage of the data: an empty one where the stage is new."""
        return self if stage == self.stage else SpikeWindow(stage=stage)

    def to_json(self) -> dict[str, object]:
        """Returns this as data that JSON can hold, {} if nothing was seen."""
        is_empty = not (self.stage or self.in_a_row or self.losses)
        return {} if is_empty else {**vars(self), "losses": [*self.losses], "grad_norms": [*self.grad_norms]}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "SpikeWindow":
        """Returns the window that to_json() describes, which parse_progress() has checked."""
        lists = {name: tuple(content[name]) for name in ("losses", "grad_norms") if content}
        return SpikeWindow(**{**content, **lists})
