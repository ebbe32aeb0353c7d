"""What came of a step and of a run, and how it is reported."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_clone.observe.by_source import Totals

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("torchtitan_clone")


class TrainingError(Exception):
    """Training cannot continue; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one attempt at a step, equal on all ranks but for the times."""

    step: int
    loss: float
    grad_norm: float
    auxiliary: dict[str, float]
    loads: Mapping[str, "Tensor"]
    """Tokens [E] of each expert by router, fp64."""
    by_source: Mapping[str, Totals]
    data_seconds: float
    stop: bool
    committed: bool
    """False if the attempt has no effect, because another replica group failed in it."""
    save_overdue: bool


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What is left of a run when its process ends."""

    step: int
    last_step: int
    is_seed_checkpoint: bool
    is_saving_enabled: bool
    is_writer: bool
    """Whether this replica group is the one that saves."""
    is_obsolete: bool
    """Whether other replica groups completed the run meanwhile."""
    saved_step: int
    """The latest step of which this process committed a checkpoint, or from which it resumed."""
    is_exported: bool
    """False if the export of the last step was asked for and failed."""
    stop_reason: str
    goodput: str
    next_steps: Sequence[str] = ()
    """Lines that say where the results are, and how to go on."""

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint of the last trained step is committed."""
        return self.is_saving_enabled and self.saved_step == self.step

    def report(self) -> None:
        """Logs the end of the run. TrainingError where the last step could not be saved or exported."""
        step, last_step = self.step, self.last_step
        if self.is_obsolete:
            logger.info(
                "other replica groups have completed the run; this one ends after step %d of %d", step, last_step
            )
            return
        if self.is_saving_enabled and self.is_writer and not self.is_saved:
            raise TrainingError(
                f"step {step} of {last_step} was trained but could not be saved, see above; the latest checkpoint is "
                f"that of step {self.saved_step}. Remove the cause and rerun the same command"
            )
        if step == last_step and not self.is_exported:
            raise TrainingError(f"step {step} was trained, but its weights could not be exported, see above")
        if self.is_seed_checkpoint:
            logger.info("the initial state is saved as step %d", step)
        elif step == last_step:
            logger.info("training is complete: step %d of %d", step, last_step)
            for line in (self.goodput, *self.next_steps):
                logger.info("%s", line)
        elif step == 0:
            logger.info("stopped by %s: no step is trained yet; rerun the same command to start", self.stop_reason)
        elif self.is_saved:
            logger.info("stopped by %s: step %d is saved, rerun the same command to resume", self.stop_reason, step)
        elif self.is_saving_enabled:
            logger.info(
                "stopped by %s after step %d: another replica group continues or saves it; rerun the same command to "
                "rejoin",
                self.stop_reason,
                step,
            )
        else:
            logger.warning("stopped by %s after step %d, which is not saved", self.stop_reason, step)
