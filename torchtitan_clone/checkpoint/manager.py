"""Saves and loads the training state of one run."""

import json
import logging
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone import __version__
from torchtitan_clone.checkpoint.agree import agree_on_steps
from torchtitan_clone.checkpoint.folder import (
    CONFIG_FILE,
    MODEL_ONLY_FOLDER,
    VERSIONS_FILE,
    Progress,
    mark_finished,
)
from torchtitan_clone.checkpoint.format import MODEL, lay_out, random_state
from torchtitan_clone.checkpoint.save import (
    DIRECT,
    RankFile,
    Save,
    SaveReport,
    lack_of_space,
    save_thread,
    warn_of_failure,
)
from torchtitan_clone.checkpoint.tensor_file import exported_dtype
from torchtitan_clone.comm.json_collectives import all_gather_json, optional_text
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint

if TYPE_CHECKING:
    from torchtitan_clone.checkpoint.load import ResumePoint

logger = logging.getLogger("torchtitan_clone")


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

    At most one save is in progress; one that becomes due meanwhile is skipped.
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
        self._extra_files = {CONFIG_FILE: config, VERSIONS_FILE: _versions()}
        self._thread = save_thread()
        self._file: RankFile | None = None
        self._resume_point: ResumePoint | None = None
        self._save: Save | None = None
        self._previous: Save | None = None
        self._unreported: list[Save] = []

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
        options = self._options
        self._resume_point = None
        steps = agree_on_steps(options, folder=self._folder, identity=self._identity, group=self._group)
        is_asked_for = bool(options.initial_load_path) or (options.enable and options.load_step != -1)
        if not steps.had_any and not is_asked_for:
            return None
        from torchtitan_clone.checkpoint.load import find_resume_point  # not needed by most first starts

        self._resume_point = find_resume_point(
            options, folder=self._folder, steps=steps, identity=self._identity, group=self._group
        )
        if self._resume_point is None or self._resume_point.progress is None:
            return None
        self.saved_step = self._resume_point.progress.step
        return self._resume_point.progress

    def load(self) -> Progress | None:
        """Fills the tensors from the checkpoint that was found, or another if it is gone; its progress. Collective."""
        if self._resume_point is None:
            return None
        from torchtitan_clone.checkpoint.load import load_resume_point

        state = self._state() | random_state()
        while not load_resume_point(self._resume_point, checkpoint=self._options, state=state):
            if self.find_resume_point() is None:
                raise ConfigError(f"{self._folder}: all steps were deleted while this run started; start it again")
        return self._resume_point.progress

    def prepare(self) -> None:
        """Decides who writes what, and allocates buffers in the background. Valid until `forget_layout`. Collective."""
        if self._file is not None or not self.is_saving_enabled:
            return
        options = self._options
        layout = lay_out(self._state() | random_state())
        self._file = RankFile(layout, mode=options.async_mode, timeout_seconds=options.writer_timeout_seconds)
        self._thread.submit(_log_errors, self._file.prepare)

    def forget_layout(self) -> None:
        """Finishes saves and drops the layout. Collective; call it before names, shapes or shardings change."""
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
        save = self._start(progress, folder=self._folder, file=self._file, state=state, options=self._options)
        if save is None:
            return
        self._policy.record_save()
        if wait or self._options.async_mode == DIRECT:
            self.finish()
        save.report.blocked_seconds += time.perf_counter() - start

    def _start(
        self, progress: Progress, *, folder: Path, file: RankFile, state: dict[str, Tensor], options: Checkpoint
    ) -> Save | None:
        """Starts to save a step; None, with a warning, if a save is in progress or the disk is too full. Collective."""
        save_id, error = self._agree(lack_of_space(folder, size=file.layout.total_bytes))
        if error is not None:
            if dist.get_rank() == 0:
                warn_of_failure(progress.step, error)
            return None
        save = Save(progress, folder=folder, save_id=save_id, file=file, checkpoint=options, group=self._group)
        self._save = save
        if dist.get_rank() == 0:
            self._unreported.append(save)
        if file.buffer is not None:
            file.buffer.follow_current_stream()
            self._thread.submit(_log_errors, lambda: save.run(state, extra_files=self._extra_files))
        else:
            save.run(state, extra_files=self._extra_files)
        return save

    def _agree(self, error: str | None) -> tuple[str, str | None]:
        """Exchanges the state of all ranks; returns the id of the next save and why it cannot start. Collective."""
        is_busy = self._save is not None and not self._save.finished.is_set()
        answers = [value.items(count=3) for value in all_gather_json([is_busy, uuid.uuid4().hex[:12], error])]
        save_id = answers[0][1].text(pattern="[0-9a-f]{12}")
        error = next((text for *_, each in answers if (text := optional_text(each)) is not None), None)
        if any(busy.flag() for busy, _, _ in answers):
            return save_id, "the previous save is still in progress; if this repeats, increase checkpoint.interval"
        self.finish()  # the outcome is announced, and the next save may fail
        if self._previous is not None and dist.get_rank() == 0:
            self._previous.votes.forget()  # all ranks have read its outcome before this collective
        self._previous, self._save = self._save, None
        return save_id, error

    def wait_for_staging(self) -> None:
        """Waits until the save in progress has copied the state. Call it just before the state changes."""
        if self._save is not None and not self._save.finished.is_set():
            self._save.wait_for_staging()

    def finish(self) -> None:
        """Waits until the save in progress is committed or has failed, for a bounded time. Call it on every rank."""
        if self._save is not None and self._save.outcome() is None:
            self.saved_step = self._save.report.step

    def reports(self) -> Iterator[SaveReport]:
        """Yields, on rank 0, a report for each save that ended since the last call."""
        for save in [save for save in self._unreported if save.finished.is_set()]:
            self._unreported.remove(save)
            yield save.report

    def mark_complete(self, progress: Progress) -> bool:
        """Exports the weights if configured and, if that succeeds, marks the run as complete. Collective."""
        if self._options.last_save_model_only and not self._save_model_only(progress):
            return False
        if dist.get_rank() == 0:
            mark_finished(self._folder, step=progress.step)
        return True

    def _save_model_only(self, progress: Progress) -> bool:
        """Saves parameters and buffers only, floating-point ones in export_dtype; returns if all could. Collective."""
        wanted = getattr(torch, self._options.export_dtype)
        model = {name: tensor for name, tensor in self._state().items() if name.startswith(MODEL)}
        model = {name: tensor.to(exported_dtype(name, tensor.dtype, wanted=wanted)) for name, tensor in model.items()}
        file = RankFile(lay_out(model), mode=DIRECT, timeout_seconds=self._options.writer_timeout_seconds)
        options = replace(self._options, keep_latest_k=0)
        save = self._start(progress, folder=self._folder / MODEL_ONLY_FOLDER, file=file, state=model, options=options)
        is_committed = save is not None and save.outcome() is None
        return all(answer.flag() for answer in all_gather_json(is_committed))

    def close(self) -> None:
        """Ends the writer process and frees the staging memory. Call it after `finish`."""
        if self._file is not None:
            self._thread.submit(_log_errors, self._file.close)


def _log_errors(action: Callable[[], None]) -> None:
    """Logs an exception, which would otherwise be lost in the thread."""
    try:
        action()
    except Exception:
        logger.exception("checkpoint: a background thread failed")


def _versions() -> str:
    versions = {"torchtitan_clone": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return json.dumps({**versions, "ranks": dist.get_world_size()}, indent=1)
