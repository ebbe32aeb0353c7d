"""Goodput: how the wall-clock time of a run was spent over all restarts, as cumulative rows of metrics.jsonl.

A killed process leaves no final row; the next one reconstructs its time from the rows after the last goodput row.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torchtitan_clone.documents import DocumentError, parse_json, read_regular

EVENT = "goodput"
Kind = Literal["start_up", "saving", "healing", "waiting", "thrown_away"]
KINDS: dict[Kind, str] = {
    "start_up": "from process start to the first step",
    "saving": "blocked by saving checkpoints or exporting weights",
    "healing": "loading state from another replica group",
    "waiting": "for other replica groups, and between two processes of the run",
    "thrown_away": "in steps that were repeated after a failure",
}
"""Categories of time that is not progress."""
MAX_METRICS_BYTES = 1 << 32
_SUMS = ("progress", *KINDS)
_SECONDS = [f"{name}_seconds" for name in _SUMS]
_MAX_SECONDS = 1e12


class Ledger:
    """Counts time since `started` (seconds since the epoch) as start-up until that is booked, then as progress."""

    def __init__(self, *, started: float, sums: Mapping[str, float] | None = None) -> None:
        self._started = started
        self._booked = 0.0
        self._present: Kind | Literal["progress"] = "start_up"
        self._sums = {"progress": 0.0, **dict.fromkeys(KINDS, 0.0), "starts": 0, "steps_thrown_away": 0, **(sums or {})}
        self._sums["starts"] += 1

    def book(self, kind: Kind, seconds: float) -> None:
        self._sums[kind] += seconds
        self._booked += seconds
        self._present = "progress" if kind == "start_up" else self._present

    def throw_away(self, *, steps: int, seconds: float) -> None:
        self.book("thrown_away", seconds)
        self._sums["steps_thrown_away"] += steps

    def row(self) -> dict[str, float]:
        """Returns the totals so far as columns of metrics.jsonl."""
        sums = {**self._sums, self._present: self._sums[self._present] + time.time() - self._started - self._booked}
        progress, seconds = sums["progress"], {f"{kind}_seconds": sums[kind] for kind in KINDS}
        counts = {name: sums[name] for name in ("starts", "steps_thrown_away")}
        total = progress + sum(seconds.values())
        return {"goodput_percent": 100 * progress / total, "progress_seconds": progress, **seconds, **counts}


def describe_goodput(row: Mapping[str, float]) -> str:
    """Returns the columns of a ledger's row as one line."""
    total = row["progress_seconds"] + sum(row[f"{kind}_seconds"] for kind in KINDS)
    shares = [f"{kind.replace('_', ' ')} {row[f'{kind}_seconds']:.1f} s" for kind in KINDS]
    starts = "1 start" if row["starts"] == 1 else f"{row['starts']} starts"
    return (
        f"goodput {row['goodput_percent']:.1f} %: {row['progress_seconds']:.1f} s of {total:.1f} s were progress, "
        f"over {starts}; {', '.join(shares)} ({row['steps_thrown_away']} steps)"
    )


def resumed_ledger(file: Path, *, resume_step: int, lost: int, started: float) -> Ledger:
    """Returns the ledger of a process that resumes from metrics.jsonl; other replica groups repeated `lost` steps."""
    written, last = _newest_rows(read_rows(file))
    if not written:
        return Ledger(started=started)
    sums = {name: written[f"{name}_seconds"] for name in _SUMS}
    sums |= {name: written[name] for name in ("starts", "steps_thrown_away")}
    since = last["time"] - written["time"]
    steps_since = last["step"] - written["step"]
    steps_lost = max(0, last["step"] - resume_step) + lost
    if steps_lost > steps_since:  # a checkpoint was lost too, and the ledger counts its steps as progress
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


def last_sign(file: Path) -> dict[str, float | bool]:
    """Returns step and time of the last row of metrics.jsonl, none without rows, and whether the run was complete."""
    written, last = _newest_rows(read_rows(file))
    signs = {"last_step": last["step"], "last_time": last["time"]} if last else {}
    return {**signs, "was_complete": bool(written and written["complete"])}


def read_rows(file: Path) -> list[bytes]:
    """Returns the lines of metrics.jsonl with their ends; DocumentError if it is not a regular file or too large."""
    try:
        return read_regular(file, max_bytes=MAX_METRICS_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _newest_rows(lines: list[bytes]) -> tuple[dict[str, float] | None, dict[str, float]]:
    """Returns the numbers of the last goodput row, None if there is none, and of the last row of any kind."""
    last: dict[str, float] = {}
    for line in reversed(lines):
        try:
            numbers = _numbers_of(line)
        except (DocumentError, KeyError):
            continue  # a killed process leaves an incomplete line
        last = last or numbers
        if "complete" in numbers:
            return numbers, last
    return None, last


def _numbers_of(line: bytes) -> dict[str, float]:
    """Returns step and time of a row, and the totals if it is a goodput row. DocumentError, KeyError if it is none."""
    values = parse_json(line, where="row").entries()
    numbers = {"step": values["step"].integer(), "time": values["time"].number()}
    if "event" in values and values["event"].value == EVENT:
        numbers |= {name: values[name].number(low=-_MAX_SECONDS, high=_MAX_SECONDS) for name in _SECONDS}
        numbers |= {name: values[name].integer() for name in ("starts", "steps_thrown_away")}
        numbers["complete"] = values["complete"].flag()
    return numbers
