"""Saves and loads the training state of one run."""

import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone import __version__
from torchtitan_clone.checkpoint.commit import CONFIG_FILE, VERSIONS_FILE, Progress, mark_finished
from torchtitan_clone.checkpoint.layout import plan_save
from torchtitan_clone.checkpoint.random_state import random_state
from torchtitan_clone.checkpoint.rank_file import RankFile
from torchtitan_clone.checkpoint.resume import ResumePoint, find_resume_point, load_resume_point
from torchtitan_clone.checkpoint.saving import SaveReport, SaveRunner
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint


class SavePolicy:
    """Decides which steps are saved, as the options of `[checkpoint]` define it. `clock` returns seconds."""

    def __init__(self, checkpoint: Checkpoint, *, clock: Callable[[], float] = time.monotonic):
        self._options = checkpoint
        self._clock = clock
        self._last_save = clock()

    def record_save(self) -> None:
        self._last_save = self._clock()

    def is_overdue(self) -> bool:
        minutes = self._options.interval_minutes
        return minutes is not None and self._clock() - self._last_save >= 60 * minutes

    def is_due(self, step: int, *, overdue: bool) -> bool:
        is_first = self._options.enable_first_step_checkpoint and step == 1
        return step % self._options.interval == 0 or self.is_permanent(step) or is_first or overdue

    def is_permanent(self, step: int) -> bool:
        """Returns whether keep_every exempts the step from deletion."""
        return self._options.keep_every > 0 and step % self._options.keep_every == 0


class CheckpointManager:
    """Saves and loads the training state of one run. All ranks call its "Collective" methods in the same order.

    `state` returns the tensors of training by name; loading fills them in place. Each is a DTensor, or identical on
    every rank that has it. `config` is the text of the configuration, which every checkpoint contains, `identity` the
    part of it that tells the run from others. `group` is the name of this replica group if others use the folder too.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        folder: Path,
        state: Callable[[], dict[str, Tensor]],
        config: str,
        identity: str = "",
        group: str = "",
    ):
        self.is_saving_enabled = checkpoint.enable and not checkpoint.load_only
        self.saved_step = 0  # the newest step that was committed or resumed from; up to date after `finish`
        self._options = checkpoint
        self._folder = folder
        self._state = state
        self._identity = identity
        self._group = group
        self._policy = SavePolicy(checkpoint)
        self._saves = SaveRunner(checkpoint, extra_files={CONFIG_FILE: config, VERSIONS_FILE: _versions()}, group=group)
        self._file: RankFile | None = None
        self._resume_point: ResumePoint | None = None

    @property
    def writer_pid(self) -> int | None:
        return self._file.writer_pid if self._file else None

    def is_overdue(self) -> bool:
        """Returns whether interval_minutes have passed since the last save. Clocks differ: let one rank decide."""
        return self._policy.is_overdue()

    def is_due(self, step: int, *, overdue: bool) -> bool:
        return self.is_saving_enabled and self._policy.is_due(step, overdue=overdue)

    def find_resume_point(self) -> Progress | None:
        """Returns the progress of the newest intact step, None for a new run; ConfigError if none is. Collective."""
        self._resume_point = find_resume_point(
            self._options, folder=self._folder, identity=self._identity, group=self._group
        )
        if self._resume_point is None or self._resume_point.progress is None:
            return None
        self.saved_step = self._resume_point.progress.step
        return self._resume_point.progress

    def load(self) -> Progress | None:
        """Fills the tensors from the checkpoint that was found, or another if it is gone; its progress. Collective."""
        state = self._state() | random_state()
        while self._resume_point and not load_resume_point(self._resume_point, checkpoint=self._options, state=state):
            if self.find_resume_point() is None:
                raise ConfigError(f"{self._folder}: all steps were deleted while this run started; start it again")
        return self._resume_point and self._resume_point.progress

    def prepare(self) -> None:
        """Plans who writes what, and allocates buffers in the background. Valid until `forget_plan`. Collective."""
        if self._file is not None or not self.is_saving_enabled:
            return
        options = self._options
        plan = plan_save(self._state() | random_state())
        self._file = RankFile(plan, mode=options.async_mode, timeout_seconds=options.writer_timeout_seconds)
        self._saves.run_in_background(self._file.prepare)

    def forget_plan(self) -> None:
        """Finishes saves and drops the plan. Collective; call it before names, shapes or shardings change."""
        self.finish()
        self.close()
        self._file = None

    def save(self, progress: Progress, *, wait: bool = False) -> None:
        """Starts to save a step; with `wait`, finishes the previous save first and returns after the commit.

        Collective. Permanent steps always wait. A failure, such as a full disk, is reported and not raised.
        """
        start = time.perf_counter()
        wait = wait or self._policy.is_permanent(progress.step)
        if wait:
            self.finish()
        self.prepare()
        assert self._file is not None
        state = self._state() | random_state()
        save = self._saves.start(progress, folder=self._folder, file=self._file, state=state)
        if save is None:
            return
        self._policy.record_save()
        if wait or self._options.async_mode == "disabled":
            self.finish()
        save.report.blocked_seconds += time.perf_counter() - start

    def wait_for_staging(self) -> None:
        """Waits until the save in progress has copied the state. Call it just before the state changes."""
        self._saves.wait_for_staging()

    def finish(self) -> None:
        """Waits until the save in progress is committed or has failed, for a bounded time. Call it on every rank."""
        if (step := self._saves.finish()) is not None:
            self.saved_step = step

    def reports(self) -> Iterator[SaveReport]:
        """Yields, on rank 0, a report for each save that ended since the last call."""
        return self._saves.reports()

    def mark_complete(self, progress: Progress) -> bool:
        """Exports the weights if configured and, if that succeeds, marks the run as complete. Collective."""
        exports = self._options.last_save_model_only
        if exports and not self._saves.save_model_only(progress, folder=self._folder, state=self._state()):
            return False
        if dist.get_rank() == 0:
            mark_finished(self._folder, step=progress.step)
        return True

    def close(self) -> None:
        """Ends the writer process and frees the staging memory. Call it after `finish`."""
        if self._file is not None:
            self._saves.run_in_background(self._file.close)


def _versions() -> str:
    versions = {"torchtitan_clone": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return json.dumps({**versions, "ranks": dist.get_world_size()}, indent=1)
