"""Requests to stop: a signal or a limit of time asks, all ranks agree, the trainer answers between two steps.

Imports nothing heavy, because the handlers are installed before torch is imported: a signal that arrives during
start-up must not be lost. The launcher holds signals back until then.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchtitan_clone.config.signals import STOP_SIGNALS

REQUEUE_EXIT_CODE = 75
"""Of a run that was stopped with steps left, where `preemption.requeue` asks for it: a temporary failure."""


class StopBeforeTraining(BaseException):
    """The run was asked to stop while there was nothing to save yet."""


class StopRequest:
    """What asked this process to stop, and when. The first request counts; later ones change nothing."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Name of a signal or an option."""
        self._started = time.monotonic()
        self._asked = self._started
        self._ends_at_once = False

    def install(self) -> None:
        """Takes over the stop signals of this process, also those held back so far; main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Inside, a signal raises StopBeforeTraining, also one that came before; outside it is only remembered."""
        self._ends_at_once = True
        try:
            if self.reason is not None:
                raise StopBeforeTraining(self.reason)
            yield
        finally:
            self._ends_at_once = False

    @property
    def age_seconds(self) -> float:
        """Time since the process began to listen."""
        return time.monotonic() - self._started

    def is_wanted(self, *, max_seconds: float | None, seconds_needed: float) -> bool:
        """Whether this process was asked to stop, or will have run for `max_seconds` in `seconds_needed` from now."""
        if max_seconds is not None and self.age_seconds + seconds_needed >= max_seconds:
            self._ask("training.max_seconds")
        return self.reason is not None

    @property
    def seconds_since(self) -> float:
        """Seconds since the process was asked; 0 where it was not."""
        return 0.0 if self.reason is None else time.monotonic() - self._asked

    def _ask(self, reason: str) -> None:
        if self.reason is None:
            self.reason, self._asked = reason, time.monotonic()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._ask(signal.Signals(number).name)
        if self._ends_at_once:
            self._ends_at_once = False
            raise StopBeforeTraining(self.reason)
