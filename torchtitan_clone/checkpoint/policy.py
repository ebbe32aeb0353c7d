"""Decides which steps are saved and which of these are permanent."""

import time
from collections.abc import Callable

from torchtitan_clone.config.schema import Checkpoint


class SavePolicy:
    """The save schedule of one run, as the options of `[checkpoint]` define it. `clock` returns seconds."""

    def __init__(self, checkpoint: Checkpoint, *, clock: Callable[[], float] = time.monotonic):
        self._options = checkpoint
        self._clock = clock
        self._last_save = clock()

    def record_save(self) -> None:
        """Restarts the clock of interval_minutes."""
        self._last_save = self._clock()

    def is_overdue(self) -> bool:
        """Returns whether interval_minutes have passed since the last save. Clocks differ: let one rank decide."""
        minutes = self._options.interval_minutes
        return minutes is not None and self._clock() - self._last_save >= 60 * minutes

    def is_due(self, step: int, *, overdue: bool) -> bool:
        """Returns whether to save after this step."""
        options = self._options
        is_first = options.enable_first_step_checkpoint and step == 1
        return step % options.interval == 0 or self.is_permanent(step) or is_first or overdue

    def is_permanent(self, step: int) -> bool:
        """Returns whether keep_every exempts the step from deletion."""
        return self._options.keep_every > 0 and step % self._options.keep_every == 0
