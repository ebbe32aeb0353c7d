"""The log of what a rank trained on and what was committed, one line of JSON per event."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torchft

from torchtitan_clone.torch_compat import quorum_id

TAIL_BYTES = 1 << 20
"""How much of the end of each log is read, some thousand steps, to find steps that were rolled back."""


class AttemptLog:
    """Appends to rows.rank*.jsonl in the folder of this replica group."""

    def __init__(self, folder: Path, *, rank: int, manager: torchft.Manager):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._manager = manager
        self._file = (folder / f"rows.rank{rank}.jsonl").open("a", buffering=1)

    def write(self, **values: object) -> None:
        """Appends a line with these values, the step that is being attempted, its quorum, and the time."""
        step = self._manager.current_step() + (0 if values.get("committed") else 1)
        row = {"step": step, "quorum": quorum_id(self._manager), "time": time.time()} | values
        self._file.write(json.dumps(row) + "\n")

    def rolled_back_steps(self) -> set[int]:
        """Returns the recent steps (TAIL_BYTES) that other groups committed again later, in another quorum."""
        own_quorums: dict[int, int] = {}
        latest: dict[int, tuple[float, int]] = {}
        for file in self._folder.parent.glob("replica-*/rows.rank0.jsonl"):
            for step, seconds, quorum in _committed_attempts(file):
                latest[step] = max((seconds, quorum), latest.get(step, (seconds, quorum)))
                if file.parent == self._folder:
                    own_quorums[step] = quorum
        return {step for step, quorum in own_quorums.items() if latest[step][1] != quorum}

    def close(self) -> None:
        self._file.close()


def _committed_attempts(file: Path) -> Iterator[tuple[int, float, int]]:
    """Yields step, time and quorum."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        for line in stream.read().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # an incomplete line
                continue
            if isinstance(row, dict) and row.get("committed"):
                yield row["step"], row["time"], row["quorum"]
