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
SLOWER_LINK = 3
"""Times what is usual from which on a link is: between machines some are longer than others."""


class Heartbeat:
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
class StepBreakdown:
    """Seconds of one step of one rank, and of its link: those in which a few MiB from rank `source` arrived after it.

    A rank that others wait for has little `communication` itself: that is mostly waiting. None where it is not known.
    """

    host: str
    data: float
    total: float
    communication: float | None
    source: int
    link: float

    @property
    def computation(self) -> float | None:
        """What is left."""
        return None if self.communication is None else self.total - self.data - self.communication


def step_breakdown(
    *, data: float, total: float, communication: float | None, source: int, link: float
) -> StepBreakdown:
    """Of this process's step."""
    return StepBreakdown(
        host=socket.gethostname(), data=data, total=total, communication=communication, source=source, link=link
    )


def describe_stragglers(ranks: list[StepBreakdown]) -> list[str]:
    """A line for each rank that is much slower than the median in a part of its own, and by how much."""
    lines = []
    for part in ("data", "computation"):
        seconds = [getattr(parts, part) for parts in ranks]
        if None in seconds:
            continue
        median = statistics.median_low(seconds)
        step = max(parts.total for parts in ranks)
        lines += [
            f"rank {rank} ({ranks[rank].host}) is slow in {part}: {own:.3f} s, median {median:.3f} s, step {step:.3f} s"
            for rank, own in enumerate(seconds)
            if own > SLOWER * median and own - median > (SLOWER - 1) * step
        ]
    return lines


def describe_slow_links(ranks: list[StepBreakdown], *, noise_seconds: float) -> list[str]:
    """A line for each link that is much slower than others of its kind, or for the rank at which two of them meet."""
    is_local = [ranks[parts.source].host == parts.host for parts in ranks]
    usual = {
        kind: _usual([parts.link for parts, own in zip(ranks, is_local, strict=True) if own == kind])
        for kind in set(is_local)
    }
    slow = {
        (parts.source, rank): f"{parts.link:.4f} s, usual {usual[kind]:.4f} s"
        for rank, (parts, kind) in enumerate(zip(ranks, is_local, strict=True))
        if parts.link > SLOWER_LINK * usual[kind] and parts.link - usual[kind] > noise_seconds
    }
    lines, names = [], [f"rank {rank} ({parts.host})" for rank, parts in enumerate(ranks)]
    slow_ranks = {receiver for _, receiver in slow} & {sender for sender, _ in slow}
    for (sender, receiver), seconds in slow.items():
        if receiver in slow_ranks:
            lines.append(f"{names[receiver]} is slow in communication, to receive and to send: {seconds}")
        elif sender not in slow_ranks:
            lines.append(f"the link from {names[sender]} to {names[receiver]} is slow: {seconds}")
    return lines


def _usual(seconds: list[float]) -> float:
    """What a third of them keep to: of three links, two may be those of one slow rank."""
    return sorted(seconds)[(len(seconds) - 1) // 3]
