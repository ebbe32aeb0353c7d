"""Steps whose loss or gradient norm is far above those before them, which a run may skip.

The values are those of the whole global batch, after the sums over ranks and replica groups: all decide alike.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan_clone.config.schema import Training
from torchtitan_clone.documents import Value

MIN_RELATIVE_DEVIATION = 1e-3
"""Least standard deviation over the mean: where values hardly differ, rounding is no spike."""


@dataclass(frozen=True, kw_only=True)
class SpikeWindow:
    """The losses and gradient norms of the last steps that were no spikes, oldest first, in one stage of the data."""

    stage: int = 0
    in_a_row: int = 0
    """Spikes since the last step that was none."""
    losses: Sequence[float] = field(default_factory=tuple[float, ...])
    grad_norms: Sequence[float] = field(default_factory=tuple[float, ...])

    def find_spike(self, *, loss: float, grad_norm: float, options: Training) -> str | None:
        """Returns what is far above the window, with its mean and deviation; None if nothing is.

        Nothing is before the window is half full. Source: OLMo-core's rule of skipped steps.
        """
        if len(self.losses) < options.spike_window // 2:
            return None
        for name, value, window in (("loss", loss, self.losses), ("gradient norm", grad_norm, self.grad_norms)):
            mean = statistics.fmean(window)
            deviation = max(statistics.stdev(window, mean), MIN_RELATIVE_DEVIATION * abs(mean))
            if value - mean > options.spike_sigma * deviation:
                return (
                    f"{name} {value:.4g}, mean {mean:.4g} and standard deviation {deviation:.2g} of {len(window)} steps"
                )
        return None

    def after(self, *, loss: float, grad_norm: float, is_spike: bool, options: Training) -> "SpikeWindow":
        """Returns the window after a step. After `spike_patience` spikes in a row their level counts as the new one."""
        if is_spike and self.in_a_row + 1 < options.spike_patience:
            return SpikeWindow(
                stage=self.stage, in_a_row=self.in_a_row + 1, losses=self.losses, grad_norms=self.grad_norms
            )
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
        if not (self.stage or self.in_a_row or self.losses):
            return {}
        return {
            "stage": self.stage,
            "in_a_row": self.in_a_row,
            "losses": [*self.losses],
            "grad_norms": [*self.grad_norms],
        }

    @staticmethod
    def from_json(content: Mapping[str, object]) -> "SpikeWindow":
        """Returns the window that to_json() describes; DocumentError if a value has another type or range."""
        if not content:
            return SpikeWindow()
        entries = Value(content, where="spikes").table("stage", "in_a_row", "losses", "grad_norms")
        losses, norms = ([each.number() for each in entries[name].items()] for name in ("losses", "grad_norms"))
        if len(losses) != len(norms):
            entries["grad_norms"].refuse("must have as many values as losses")
        return SpikeWindow(
            stage=entries["stage"].integer(),
            in_a_row=entries["in_a_row"].integer(),
            losses=tuple(losses),
            grad_norms=tuple(norms),
        )
