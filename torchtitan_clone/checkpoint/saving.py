"""One save, from the moment at which all ranks know of it: stage, write, report; and on rank 0 collect and commit."""

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.commit import PROGRESS_FILE, Progress, commit, purge, step_folder, write_manifest
from torchtitan_clone.checkpoint.layout import INDEX_FILE, Plan
from torchtitan_clone.checkpoint.rank_file import RankFile
from torchtitan_clone.checkpoint.save_votes import Part, Parts
from torchtitan_clone.checkpoint.writer import FileRecord, write_file
from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

_PATIENCE = 3
"""Longest wait for another rank, in writer timeouts: two attempts of its writer, and a thread's."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One attempt to save: `error` says why it failed, None means committed.

    `seconds` run from the beginning to the commit; the training waited for `blocked_seconds` of them. The copy was
    taken in `staging_seconds`, 0 where the state itself is written.
    """

    step: int
    seconds: float
    blocked_seconds: float
    staging_seconds: float
    bytes: int
    error: str | None


class Save:
    """A save in flight. `staged` is set when the state may change again, `over` when this rank has done its share."""

    def __init__(
        self,
        progress: Progress,
        *,
        folder: Path,
        save_id: str,
        plan: Plan,
        file: RankFile,
        documents: Mapping[str, str],
        checkpoint: Checkpoint,
    ):
        self._progress = progress
        self._folder = folder
        self._partial = folder / f"step-{progress.step}.partial-{save_id}"
        self._plan = plan
        self._documents = documents
        self._options = checkpoint
        self._start = time.perf_counter()
        self._seconds = self._staging_seconds = 0.0
        self._error: str | None = None
        self._parts = Parts(save_id)
        self.file = file
        self.staged = Event()
        self.over = Event()
        self.blocked_seconds = 0.0

    @property
    def step(self) -> int:
        """The step it saves."""
        return self._progress.step

    @property
    def report(self) -> SaveReport:
        """What became of it, as rank 0 knows."""
        return SaveReport(
            step=self._progress.step,
            seconds=self._seconds,
            blocked_seconds=self.blocked_seconds,
            staging_seconds=self._staging_seconds,
            bytes=self._plan.total_bytes,
            error=self._error,
        )

    def run(self, state: dict[str, Tensor]) -> None:
        """This rank's share of it; for rank 0 that is everything up to the commit."""
        try:
            self._parts.report(self._write(state))
            if dist.get_rank() == 0:
                self._error = self._conclude()
                self._seconds = time.perf_counter() - self._start
                if self._error is not None:
                    warn_of_failure(self._progress.step, self._error)
                self._parts.announce(self._error)
        finally:
            self.staged.set()
            self.over.set()

    def outcome(self) -> str | None:
        """What rank 0 says became of it, as soon as it does, but in bounded time: an error, or None for committed."""
        patience = (_PATIENCE + 1) * self._options.writer_timeout_seconds
        error = self._parts.outcome(timeout_seconds=patience)
        if error is None:
            self.over.wait(patience)
        return error

    def forget(self) -> None:
        """Rank 0 drops the outcome, when all ranks know it."""
        self._parts.forget()

    def _write(self, state: dict[str, Tensor]) -> Part:
        try:
            if self.file.is_staged:
                start = time.perf_counter()
                self.file.stage(state)
                self.staged.set()
                self.file.wait_for_copies()
                self._staging_seconds = time.perf_counter() - start
            self._partial.mkdir(parents=True, exist_ok=True)
            record = self.file.write(self._partial / self.file.name, state=state)
        except Exception as error:  # noqa: BLE001, whatever it was, rank 0 must be told
            return Part(files={}, error=f"rank {dist.get_rank()}: {_text(error)}")
        return Part(files={self.file.name: record}, error=None)

    def _conclude(self) -> str | None:
        """Rank 0 collects what the ranks report, and commits; what went wrong, or None."""
        try:
            parts = self._parts.collect(timeout_seconds=_PATIENCE * self._options.writer_timeout_seconds)
            error = next((part.error for part in parts if part.error), None)
            if error is None:
                self._commit({name: record for part in parts for name, record in part.files.items()})
                return None
        except Exception as failure:  # noqa: BLE001, whatever it was, the other ranks must be told
            error = _text(failure)
        shutil.rmtree(self._partial, ignore_errors=True)
        return error

    def _commit(self, files: dict[str, FileRecord]) -> None:
        documents = {**self._documents, INDEX_FILE: self._plan.index}
        final = step_folder(self._folder, self._progress.step)
        finalize(self._partial, final, files=files, documents=documents, progress=self._progress)
        try:
            purge(self._folder, keep_latest_k=self._options.keep_latest_k, keep_every=self._options.keep_every)
        except OSError as error:
            logger.warning("old checkpoints cannot be deleted: %s", _text(error))


def finalize(
    partial: Path, final: Path, *, files: dict[str, FileRecord], documents: Mapping[str, str], progress: Progress
) -> None:
    """Adds to the files of tensors all the others, the manifest last, and commits."""
    for name, text in {**documents, PROGRESS_FILE: json.dumps(asdict(progress), indent=1)}.items():
        files[name] = write_file(partial / name, [text.encode()])
    write_manifest(partial, step=progress.step, files=files)
    commit(partial, final)


def warn_of_failure(step: int, error: str) -> None:
    """Says that a step has no checkpoint."""
    logger.warning("step %d could not be saved: %s; training goes on without it", step, error)


def _text(error: Exception) -> str:
    """With the name of the file, where it is the disk that speaks."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
