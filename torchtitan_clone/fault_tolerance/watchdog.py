"""A watchdog for a step that does not end."""

import faulthandler
import statistics
import sys
import time
from collections import deque

RECENT = 64
"""Steps whose median is the measure."""
FEWEST = 3
"""Steps without which there is no measure: the first ones compile and read."""


class StepTimeout:
    """Ends this process, with the stacks of all threads, when a step takes `factor` median steps and `grace_seconds`.

    The clock runs in a thread of C: it needs no GIL, so that whatever hangs cannot hold it up.
    """

    def __init__(self, *, factor: float, grace_seconds: float):
        self._factor = factor
        self._grace_seconds = grace_seconds
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._start = 0.0

    def start(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()
        if len(self._seconds) >= FEWEST:
            limit = self._factor * statistics.median(self._seconds) + self._grace_seconds
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or sys.stderr)

    def stop(self) -> None:
        """It has ended."""
        faulthandler.cancel_dump_traceback_later()
        self._seconds.append(time.perf_counter() - self._start)
