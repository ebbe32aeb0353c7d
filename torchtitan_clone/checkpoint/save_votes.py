"""How the ranks tell rank 0 that their files are written, and rank 0 the others what became of the save.

Through the key-value store of the process group, not by a collective: it is asked by a thread, beside the training, and
a rank whose writer needs a second try holds nobody up. All keys begin with the save's own id.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from torchtitan_clone.checkpoint.writer import FileRecord
from torchtitan_clone.torch_compat import default_store

_LONGEST_PAUSE = 0.05


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank has to say about a save: its files, or why there are none."""

    files: dict[str, FileRecord]
    error: str | None


class Parts:
    """The answers of all ranks to one save, and its outcome."""

    def __init__(self, save_id: str):
        self._id = save_id
        self._store = default_store()
        self._world_size = dist.get_world_size()

    def report(self, part: Part) -> None:
        """This rank is done."""
        self._store.set(self._key(dist.get_rank()), json.dumps(asdict(part)))

    def collect(self, *, timeout_seconds: float) -> list[Part]:
        """The reports of all ranks, on rank 0; TimeoutError names those that have none."""
        keys = [self._key(rank) for rank in range(self._world_size)]
        if not _wait_until(lambda: self._store.check(keys), timeout_seconds=timeout_seconds):
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TimeoutError(f"ranks {silent} did not finish writing within {timeout_seconds:g} s")
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [
            Part(files={name: FileRecord(**record) for name, record in answer["files"].items()}, error=answer["error"])
            for answer in answers
        ]

    def announce(self, error: str | None) -> None:
        """Rank 0 is done: the save is committed, or it failed."""
        self._store.set(self._key("outcome"), json.dumps(error))

    def outcome(self, *, timeout_seconds: float) -> str | None:
        """What rank 0 announced: an error, or None for committed."""
        key = self._key("outcome")
        if not _wait_until(lambda: self._store.check([key]), timeout_seconds=timeout_seconds):
            return f"rank 0 did not commit it within {timeout_seconds:g} s"
        return json.loads(self._store.get(key))

    def forget(self) -> None:
        """Deletes the outcome, once all ranks know it."""
        self._store.delete_key(self._key("outcome"))

    def _key(self, name: object) -> str:
        return f"checkpoint/{self._id}/{name}"


def _wait_until(holds: Callable[[], bool], *, timeout_seconds: float) -> bool:
    """Asks again and again, less and less often."""
    deadline, pause = time.monotonic() + timeout_seconds, 0.001
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
