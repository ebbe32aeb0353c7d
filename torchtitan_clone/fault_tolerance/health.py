"""Reports about a run that is not well: a rank that hangs, a rank that is slower than the others."""

import faulthandler
import logging
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("torchtitan_clone")

SHARE_OF_TIMEOUT = 0.9
"""A hang is reported when so much of a collective's timeout has passed: after it the process may be gone."""
SLOWER = 1.2
"""Times the median from which on a rank is called slow."""


class HangWatch:
    """Writes the stacks of all threads, and the last collectives, where this process has not moved for long.

    Once per hang; it ends nothing: the collective's timeout does that.
    """

    def __init__(self, *, folder: Path, rank: int, dump_collectives: Callable[[], bytes]) -> None:
        self._folder, self._rank = folder, rank
        self._dump_collectives = dump_collectives
        self._alarm = float("inf")
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="hang-watch").start()

    def moved(self, *, timeout_seconds: float) -> None:
        """There was progress; the next is late when this timeout is nearly over. Cheap enough for every micro-batch."""
        self._timeout_seconds = timeout_seconds
        self._alarm = time.monotonic() + SHARE_OF_TIMEOUT * timeout_seconds

    def close(self) -> None:
        """Nothing is to be reported any more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(0.2):
            if time.monotonic() > self._alarm:
                self._alarm = float("inf")
                self._report()

    def _report(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        stacks = self._folder / f"rank{self._rank}_stacks.txt"
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        (self._folder / f"rank{self._rank}_collectives.json").write_bytes(self._dump_collectives())
        seconds = SHARE_OF_TIMEOUT * self._timeout_seconds
        logger.warning("nothing has moved for %.0f s; stacks and collectives: %s", seconds, stacks.parent)


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Seconds of one step of one rank; a rank that others wait for has little `communication` itself."""

    host: str
    data: float
    computation: float
    communication: float


def step_parts(*, data: float, communication: float, total: float) -> StepParts:
    """Of this process's step."""
    return StepParts(
        host=socket.gethostname(), data=data, communication=communication, computation=total - data - communication
    )


def describe_stragglers(ranks: list[StepParts]) -> list[str]:
    """A line for each rank that is much slower than the median in a part of its own, and by how much."""
    lines = []
    for part in ("data", "computation"):
        seconds = [getattr(parts, part) for parts in ranks]
        median = statistics.median_low(seconds)
        step = max(parts.data + parts.computation + parts.communication for parts in ranks)
        lines += [
            f"rank {rank} ({ranks[rank].host}) is slow in {part}: {own:.3f} s, median {median:.3f} s, step {step:.3f} s"
            for rank, own in enumerate(seconds)
            if own > SLOWER * median and own - median > (SLOWER - 1) * step
        ]
    return lines
