"""Watchdogs: `Heartbeat` reports a process that makes no progress, `StepTimeout` ends one whose step takes too long."""

import faulthandler
import logging
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path

from torchtitan_clone.torch_compat import dump_collectives

logger = logging.getLogger("torchtitan_clone")

REPORT_FRACTION = 0.9
"""Fraction of a collective's timeout after which a hang is reported: at the timeout the process may be terminated."""
POLL_SECONDS = 0.2
RECENT_STEPS = 64
MIN_STEPS = 3
"""Steps without a timeout at the start: the first ones compile."""


class Heartbeat:
    """Dumps the stacks of all threads and the recent collectives if this process makes no progress for too long.

    Reports once per hang, and does not end the process: the collective's timeout does. `rank` is the global rank.
    """

    def __init__(self, *, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._timeout_seconds = self._deadline = float("inf")
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def beat(self, *, timeout_seconds: float) -> None:
        """Marks progress; the next call is due before `timeout_seconds`. Cheap enough for every micro-batch."""
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + REPORT_FRACTION * timeout_seconds

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")
                self._report()

    def _report(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stacks = self._folder / f"rank{self._rank}_stacks.txt"
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        (self._folder / f"rank{self._rank}_collectives.json").write_bytes(dump_collectives())
        seconds = REPORT_FRACTION * self._timeout_seconds
        logger.warning("no progress for %.0f s; stacks and collectives: %s", seconds, stacks.parent)


class StepTimeout:
    """Dumps all stacks and ends this process if a step takes longer than `factor` median steps plus `grace_seconds`.

    The timer is faulthandler's C thread. It does not need the GIL, so a hang that holds the GIL cannot block it.
    """

    def __init__(self, *, factor: float, grace_seconds: float):
        self._factor = factor
        self._grace_seconds = grace_seconds
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._start = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()
        if len(self._seconds) >= MIN_STEPS:
            limit = self._factor * statistics.median(self._seconds) + self._grace_seconds
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or sys.stderr)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._seconds.append(time.perf_counter() - self._start)
