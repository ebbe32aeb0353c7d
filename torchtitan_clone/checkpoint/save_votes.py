"""Tells rank 0 which files the ranks have written, and the other ranks whether rank 0 committed the save.

Uses the key-value store, not a collective: a thread polls it next to training, and no rank blocks another.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch.distributed as dist

from torchtitan_clone.checkpoint.writer import FileRecord
from torchtitan_clone.torch_compat import default_store

_MAX_PAUSE_SECONDS = 0.05
_REMEDY = "check the log and the disk of that machine, or increase checkpoint.writer_timeout_seconds"


class SaveCoordinator:
    """Exchanges the reports of all ranks on one save, and its outcome."""

    def __init__(self, save_id: str):
        self._id = save_id
        self._store = default_store()

    def report(self, files: Mapping[str, FileRecord], *, error: str | None) -> None:
        records = {name: asdict(record) for name, record in files.items()}
        self._store.set(self._key(dist.get_rank()), json.dumps({"files": records, "error": error}))

    def collect(self, *, timeout_seconds: float) -> dict[str, FileRecord]:
        """Returns the files of all ranks. OSError with the error of a rank, TimeoutError if ranks have not reported."""
        keys = [self._key(rank) for rank in range(dist.get_world_size())]
        if not _wait_until(lambda: self._store.check(keys), timeout_seconds=timeout_seconds):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TimeoutError(f"ranks {missing} did not finish writing within {timeout_seconds:g} s; {_REMEDY}")
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        if (error := next((answer["error"] for answer in answers if answer["error"]), None)) is not None:
            raise OSError(error)
        return {name: FileRecord(**record) for answer in answers for name, record in answer["files"].items()}

    def announce(self, error: str | None) -> None:
        """Publishes the outcome, for rank 0: an error, or None for committed."""
        self._store.set(self._key("outcome"), json.dumps(error))

    def outcome(self, *, timeout_seconds: float) -> str | None:
        """Waits for the outcome that rank 0 announces: an error, or None for committed."""
        key = self._key("outcome")
        if not _wait_until(lambda: self._store.check([key]), timeout_seconds=timeout_seconds):
            return f"rank 0 did not commit within {timeout_seconds:g} s; {_REMEDY}"
        return json.loads(self._store.get(key))

    def forget(self) -> None:
        """Deletes the outcome, once all ranks know it."""
        self._store.delete_key(self._key("outcome"))

    def _key(self, name: object) -> str:
        return f"checkpoint/{self._id}/{name}"


def _wait_until(condition: Callable[[], bool], *, timeout_seconds: float) -> bool:
    """Polls with increasing pauses; returns whether the condition became true in time."""
    deadline = time.monotonic() + timeout_seconds
    pause_seconds = 0.001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
    return True
