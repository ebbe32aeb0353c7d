"""Requests to stop: a signal asks, the trainer answers between two steps.

Imports nothing heavy, because the handlers are installed before torch is imported: a signal that arrives during
start-up must not be lost.
"""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopBeforeTraining(BaseException):
    """A signal arrived while there was nothing to save yet."""


class StopRequest:
    """Remembers the first signal that asked this process to stop; later ones change nothing.

    Until `defer` is called, a signal ends what is running with StopBeforeTraining.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._deferred = False

    def defer(self) -> None:
        """From now on a signal is only remembered: the trainer finishes its step and saves."""
        self._deferred = True

    def install(self) -> None:
        """Takes over the stop signals of this process; main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            if not self._deferred:
                raise StopBeforeTraining(self.signal_name)
