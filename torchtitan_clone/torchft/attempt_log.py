"""What a replica group records of its attempts at steps in its folder, and what it reads from those of the others."""

import errno
import fcntl
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torchft

from torchtitan_clone.documents import DocumentError, open_regular, parse_json
from torchtitan_clone.observe.records import append_record
from torchtitan_clone.torch_compat import quorum_id
from torchtitan_clone.torchft.history import History

TAIL_BYTES = 1 << 20
"""How much of the end of each log is read, some thousand steps."""
LOCK_FILE = "running.lock"
"""Locked by rank 0 while the group runs; the lock ends with the process, whatever ends it."""
LOCK_ATTEMPTS = 10
"""The lock is held for a moment by a group that looks whether it is free."""


class AttemptLog:
    """Appends to rows.rank*.jsonl in the folder of this replica group."""

    def __init__(self, folder: Path, *, rank: int, manager: torchft.Manager):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._manager = manager
        self._file = folder / f"rows.rank{rank}.jsonl"
        self._lock = (folder / LOCK_FILE).open("a") if rank == 0 else None

    def start(self, step: int) -> None:
        """Records that the group starts after this step and, until the process ends, that it runs."""
        self.write(started=step)
        for _ in range(LOCK_ATTEMPTS):
            if self._lock is None or _try_lock(self._lock) is None:
                break
            time.sleep(0.05)

    def write(self, **values: object) -> None:
        """Appends these values, the step that is attempted, its quorum, and the time; a full disk loses the line."""
        step = self._manager.current_step() + (0 if values.get("committed") else 1)
        row = {"step": step, "quorum": quorum_id(self._manager), "time": time.time()} | values
        append_record(self._file, row)

    def rolled_back_steps(self, history: History) -> set[int]:
        """Returns the recent steps (TAIL_BYTES) of this group that `history`, its present one, does not contain.

        Of steps before the history, those that other groups committed again later, in another quorum.
        """
        own_quorums: dict[int, int] = {}
        latest: dict[int, tuple[float, int]] = {}
        for folder in self._folder.parent.glob("replica-*"):
            for row in _recent_rows(folder):
                if "committed" in row.keys:
                    attempt = (row.time, row.quorum)
                    latest[row.step] = max(attempt, latest.get(row.step, attempt))
                    if folder == self._folder:
                        own_quorums[row.step] = row.quorum
        return {step for step, quorum in own_quorums.items() if quorum != (history.quorum_of(step) or latest[step][1])}

    def running_groups(self) -> list[tuple[int, int]]:
        """Returns the other groups of this folder that run, and the last step that each has committed or received."""
        folders = [each for each in self._folder.parent.glob("replica-*") if each != self._folder and _is_running(each)]
        return [(int(each.name.removeprefix("replica-")), _last_step(each)) for each in folders]

    def close(self) -> None:
        if self._lock:
            self._lock.close()


def _try_lock(file: TextIO) -> int | None:
    """Locks the file; returns the error's number if it cannot, EACCES or EAGAIN if another process has locked it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno


def _is_running(folder: Path) -> bool:
    """Returns whether the group of this folder holds its lock; False if that cannot be found out."""
    if not folder.name.removeprefix("replica-").isdecimal():
        return False
    try:
        with (folder / LOCK_FILE).open("r+") as file:
            return _try_lock(file) in (errno.EACCES, errno.EAGAIN)
    except OSError:  # it has never run, or with another version
        return False


def _last_step(folder: Path) -> int:
    """Returns the last step of the group's present start; 0 if it has none yet."""
    last = 0
    for row in _recent_rows(folder):
        if "started" in row.keys:
            last = 0
        elif "committed" in row.keys:
            last = row.step
        elif "healed" in row.keys:
            last = row.step - 1  # it attempts the next one
    return last


@dataclass(frozen=True, kw_only=True)
class _Row:
    step: int
    quorum: int
    time: float
    keys: Collection[str]
    """Keys of the row whose value is not false; of 0 too."""


def _recent_rows(folder: Path) -> Iterator[_Row]:
    """Yields the recent lines of rank 0; skips incomplete ones, and a file that cannot be read."""
    try:
        with open_regular(folder / "rows.rank0.jsonl") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.readall().splitlines()
    except (OSError, DocumentError):
        return
    for line in lines:
        try:
            entries = parse_json(line, where=f"{folder.name}/rows.rank0.jsonl").entries()
            yield _Row(
                step=entries["step"].integer(),
                quorum=entries["quorum"].integer(low=-1),
                time=entries["time"].number(),
                keys=[key for key, value in entries.items() if value.value is not False],
            )
        except (DocumentError, KeyError):
            continue
