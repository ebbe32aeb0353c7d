"""One save, after all ranks have started it: stage, write and report; on rank 0 also collect and commit."""

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
from torchtitan_clone.checkpoint.save_votes import RankReport, SaveCoordinator
from torchtitan_clone.checkpoint.writer import FileRecord, write_file
from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

_TIMEOUT_FACTOR = 3
"""Longest wait for another rank, in writer timeouts: two attempts of its writer process and one of its thread."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """The result of one save: `error` says why it failed, None means it was committed.

    `seconds` is the time from start to commit, of which training waited for `blocked_seconds`. Copying the state took
    `staging_seconds`, 0 if the tensors were written directly.
    """

    step: int
    seconds: float
    blocked_seconds: float
    staging_seconds: float
    bytes: int
    error: str | None


class Save:
    """A save in progress. `staged` is set once the state may change, `finished` once this rank has done its share."""

    def __init__(
        self,
        progress: Progress,
        *,
        folder: Path,
        save_id: str,
        plan: Plan,
        file: RankFile,
        extra_files: Mapping[str, str],
        checkpoint: Checkpoint,
    ):
        self._progress = progress
        self._folder = folder
        self._partial = folder / f"step-{progress.step}.partial-{save_id}"
        self._plan = plan
        self._extra_files = extra_files
        self._options = checkpoint
        self._coordinator = SaveCoordinator(save_id)
        self._start = time.perf_counter()
        self._seconds = 0.0
        self._staging_seconds = 0.0
        self._error: str | None = None
        self.file = file
        self.staged = Event()
        self.finished = Event()
        self.blocked_seconds = 0.0

    @property
    def step(self) -> int:
        """The step being saved."""
        return self._progress.step

    @property
    def report(self) -> SaveReport:
        """The result, as rank 0 knows it."""
        return SaveReport(
            step=self._progress.step,
            seconds=self._seconds,
            blocked_seconds=self.blocked_seconds,
            staging_seconds=self._staging_seconds,
            bytes=self._plan.total_bytes,
            error=self._error,
        )

    def run(self, state: dict[str, Tensor]) -> None:
        """Does this rank's share; on rank 0, everything up to the commit."""
        try:
            self._coordinator.report(self._write(state))
            if dist.get_rank() == 0:
                self._error = self._collect_and_commit()
                self._seconds = time.perf_counter() - self._start
                if self._error is not None:
                    warn_of_failure(self._progress.step, self._error)
                self._coordinator.announce(self._error)
        finally:
            self.staged.set()
            self.finished.set()

    def outcome(self) -> str | None:
        """Waits, for a bounded time, until rank 0 announces the outcome: an error, or None for committed."""
        timeout_seconds = (_TIMEOUT_FACTOR + 1) * self._options.writer_timeout_seconds
        error = self._coordinator.outcome(timeout_seconds=timeout_seconds)
        if error is None:
            self.finished.wait(timeout_seconds)
        return error

    def forget(self) -> None:
        """Deletes the announced outcome; for rank 0, once all ranks know it."""
        self._coordinator.forget()

    def _write(self, state: dict[str, Tensor]) -> RankReport:
        try:
            if self.file.is_staged:
                start = time.perf_counter()
                self.file.stage(state)
                self.staged.set()
                self.file.wait_for_copies()
                self._staging_seconds = time.perf_counter() - start
            self._partial.mkdir(parents=True, exist_ok=True)
            record = self.file.write(self._partial / self.file.name, state=state)
        except Exception as error:  # noqa: BLE001, rank 0 must learn of every error
            return RankReport(files={}, error=f"rank {dist.get_rank()}: {_describe(error)}")
        return RankReport(files={self.file.name: record}, error=None)

    def _collect_and_commit(self) -> str | None:
        """Collects the reports of all ranks and commits, on rank 0; returns an error or None."""
        try:
            timeout_seconds = _TIMEOUT_FACTOR * self._options.writer_timeout_seconds
            reports = self._coordinator.collect(timeout_seconds=timeout_seconds)
            error = next((report.error for report in reports if report.error), None)
            if error is None:
                self._commit({name: record for report in reports for name, record in report.files.items()})
                return None
        except Exception as failure:  # noqa: BLE001, the other ranks must learn of every error
            error = _describe(failure)
        shutil.rmtree(self._partial, ignore_errors=True)
        return error

    def _commit(self, files: dict[str, FileRecord]) -> None:
        extra_files = {**self._extra_files, INDEX_FILE: self._plan.index}
        final = step_folder(self._folder, self._progress.step)
        finalize(self._partial, final, files=files, extra_files=extra_files, progress=self._progress)
        try:
            purge(self._folder, keep_latest_k=self._options.keep_latest_k, keep_every=self._options.keep_every)
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be deleted: %s", self._folder, _describe(error))


def finalize(
    partial: Path, final: Path, *, files: dict[str, FileRecord], extra_files: Mapping[str, str], progress: Progress
) -> None:
    """Adds all other files to the files of tensors, the manifest last, and commits."""
    for name, text in {**extra_files, PROGRESS_FILE: json.dumps(asdict(progress), indent=1)}.items():
        files[name] = write_file(partial / name, [text.encode()])
    write_manifest(partial, step=progress.step, files=files)
    commit(partial, final)


def warn_of_failure(step: int, error: str) -> None:
    """Logs that a step has no checkpoint."""
    logger.warning("step %d could not be saved: %s; training continues without this checkpoint", step, error)


def _describe(error: Exception) -> str:
    """Returns the message of an error, with the file name of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
