"""The goodput ledger: what the time of a run was spent on, over all its restarts, as rank 0 saw it.

It is written into metrics.jsonl as cumulative rows, at the start, with every save and at the end. A process that was
killed leaves no last row; its successor finds in the rows after the last of the ledger what it had done since.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

EVENT = "goodput"
Kind = Literal["start_up", "saving", "healing", "waiting", "thrown_away"]
KINDS: dict[Kind, str] = {
    "start_up": "from a process' start to its first step",
    "saving": "blocked by a save or an export of the weights",
    "healing": "taking over the state of another replica group",
    "waiting": "for other replica groups, and between the end of a process and the start of the next",
    "thrown_away": "in steps that had to be trained again",
}
"""What time is spent on that is not progress."""


class Ledger:
    """All time since `started` (seconds since the epoch) is progress unless it is booked as something else."""

    def __init__(self, *, started: float, sums: Mapping[str, float] | None = None) -> None:
        self._started = started
        self._booked = 0.0
        self._sums = {"progress": 0.0, **dict.fromkeys(KINDS, 0.0), "starts": 0, "steps_thrown_away": 0, **(sums or {})}
        self._sums["starts"] += 1

    def book(self, kind: Kind, seconds: float) -> None:
        """So many of the last seconds went into this."""
        self._sums[kind] += seconds
        self._booked += seconds

    def throw_away(self, *, steps: int, seconds: float) -> None:
        """These steps have to be trained again."""
        self.book("thrown_away", seconds)
        self._sums["steps_thrown_away"] += steps

    def row(self) -> dict[str, float]:
        """The sums until now."""
        progress = self._sums["progress"] + time.time() - self._started - self._booked
        seconds = {f"{kind}_seconds": self._sums[kind] for kind in KINDS}
        counts = {name: self._sums[name] for name in ("starts", "steps_thrown_away")}
        total = progress + sum(seconds.values())
        return {"goodput_percent": 100 * progress / total, "progress_seconds": progress, **seconds, **counts}

    def line(self) -> str:
        """The sums until now, for people."""
        row = self.row()
        total = row["progress_seconds"] + sum(row[f"{kind}_seconds"] for kind in KINDS)
        parts = [f"{kind.replace('_', ' ')} {row[f'{kind}_seconds']:.1f} s" for kind in KINDS]
        return (
            f"goodput {row['goodput_percent']:.1f} %: {row['progress_seconds']:.1f} s of progress in {total:.1f} s "
            f"over {row['starts']} starts; {', '.join(parts)} ({row['steps_thrown_away']} steps)"
        )


def resumed_ledger(file: Path, *, resume_step: int, lost: int, started: float) -> Ledger:
    """The ledger of a process that goes on after resume_step; `file` is metrics.jsonl as the last process left it.

    `lost` more of its steps were trained again by others.
    """
    written, last = _newest_rows(file)
    if not written:
        return Ledger(started=started)
    sums = {name.removesuffix("_seconds"): value for name, value in written.items() if name != "goodput_percent"}
    sums = {name: sums[name] for name in ("progress", *KINDS, "starts", "steps_thrown_away")}
    since = last["time"] - written["time"]
    steps_since, steps_lost = last["step"] - written["step"], max(0, last["step"] - resume_step) + lost
    if steps_lost > steps_since:  # a save was lost too: with it steps that the ledger has as progress
        earlier = min(1.0, (steps_lost - steps_since) / max(1, written["step"]))
        seconds_lost = since + earlier * sums["progress"]
    else:
        seconds_lost = since * steps_lost / steps_since if steps_since else 0.0
    sums["progress"] += since - seconds_lost
    sums["thrown_away"] += seconds_lost
    sums["steps_thrown_away"] += steps_lost
    if not written["complete"]:
        sums["waiting"] += max(0.0, started - last["time"])
    return Ledger(started=started, sums=sums)


def _newest_rows(file: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The ledger's newest row, None without one, and the newest row of all."""
    last: dict[str, Any] = {}
    for line in reversed(file.read_bytes().splitlines() if file.exists() else []):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn by the death of its process
        last = last or row
        if row.get("event") == EVENT:
            return row, last
    return None, last
