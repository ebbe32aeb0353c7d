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
from torchtitan_clone.checkpoint.agree import Places, agree_on_steps, find_leaders, leave_newer, set_aside
from torchtitan_clone.checkpoint.folder import (
    CONFIG_FILE,
    MODEL_ONLY_FOLDER,
    VERSIONS_FILE,
    CorruptCheckpointError,
    mark_finished,
    newest_complete_step,
    step_folder,
)
from torchtitan_clone.checkpoint.format import MODEL, lay_out, random_state
from torchtitan_clone.checkpoint.progress import Progress
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
from torchtitan_clone.comm.json_collectives import all_gather_json, broadcast_json, optional_text
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.config.urls import store_url

if TYPE_CHECKING:
    from torchtitan_clone.checkpoint.load import ResumePoint
    from torchtitan_clone.checkpoint.remote import RemoteFolder
    from torchtitan_clone.checkpoint.uploads import Uploader

logger = logging.getLogger("torchtitan_clone")

OUT_OF_TIME = "no time was left for its upload"
"""Why a step is not in the object store if the run had to exit."""
_SECONDS_BETWEEN_POLLS = 0.2


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

    def is_due_locally(self, step: int) -> bool:
        """Returns whether local_interval asks for the step, wherever an object store gets it."""
        interval = self._options.local_interval
        return interval is not None and step % interval == 0

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
        self._places = Places(folder=folder, identity=identity, group=group, remote=_open_remote(checkpoint))
        self._uploads: Uploader | None = None
        self._is_folder_shared = True
        self._state = state
        self._policy = SavePolicy(checkpoint)
        self.extra_files = {CONFIG_FILE: config, VERSIONS_FILE: _versions()}
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
        is_due = self.is_saving_enabled and self._policy.is_due(step, overdue=overdue)
        if self._uploads is None:
            return is_due
        self._uploads.is_wanted = is_due
        return is_due or (self._keeps_local_steps and self._policy.is_due_locally(step))

    @property
    def _keeps_local_steps(self) -> bool:
        """Whether steps count that are in the folder only."""
        return self._is_folder_shared or self._places.peers is not None

    def find_resume_point(self) -> Progress | None:
        """Returns the progress of the newest intact step, None for a new run; ConfigError if none is. Collective."""
        options = self._options
        self._resume_point = None
        if self._places.remote is not None and self.is_saving_enabled and self._uploads is None:
            from torchtitan_clone.checkpoint.uploads import Uploader

            self._uploads = Uploader(self._places.remote, checkpoint=options)
            self._find_nodes()
        steps = agree_on_steps(options, places=self._places)
        if self._uploads is not None:
            self._uploads.known |= steps.stored
        is_asked_for = bool(options.initial_load_path) or (options.enable and options.load_step != -1)
        if not steps.had_any and not is_asked_for:
            return None
        from torchtitan_clone.checkpoint.load import find_resume_point  # not needed by most first starts

        point = self._resume_point = find_resume_point(options, places=self._places, steps=steps)
        self.saved_step = 0 if point is None or point.progress is None else point.progress.step
        self._forget_newer()
        if point is None or point.progress is None:
            return None
        if point.folder == step_folder(self._places.folder, self.saved_step):
            self._upload_saved_step()
        return point.progress

    def _find_nodes(self) -> None:
        """Finds which ranks share a folder. ConfigError if an option does not fit. Collective."""
        options, leaders = self._options, find_leaders(self._places.folder)
        self._is_folder_shared = not any(leaders)
        if options.last_save_model_only and not self._is_folder_shared:
            rule = f"all ranks write it to {self._places.folder}, which nodes do not share"
            remedy = "share checkpoint.local_folder, or set it to false and last_save_in_hf to true"
            raise ConfigError(f"checkpoint.last_save_model_only = true: {rule}; {remedy}")
        if options.local_peer_copy and not self._is_folder_shared:
            from torchtitan_clone.checkpoint.peers import Peers

            peers = Peers(leaders, timeout_seconds=options.writer_timeout_seconds)
            self._places = replace(self._places, peers=peers)

    def _forget_newer(self) -> None:
        """Forgets that the store had steps after the one that was resumed from: they were set aside."""
        if self._uploads is not None:
            self._uploads.known = {step for step in self._uploads.known if step <= self.saved_step}

    def _upload_saved_step(self) -> None:
        """Uploads the newest step of the folder, if the object store lacks it. Collective."""
        uploads, folder = self._uploads, step_folder(self._places.folder, self.saved_step)
        if uploads is None or not self._keeps_local_steps or self.saved_step in uploads.known:
            return
        save_id = broadcast_json(uuid.uuid4().hex).text(pattern="[0-9a-f]+")
        if all(each.flag() for each in all_gather_json(folder.is_dir())):
            uploads.begin_folder(folder, step=self.saved_step, save_id=save_id)

    def load(self) -> Progress | None:
        """Fills the tensors from the checkpoint that was found, or another if it is gone; its progress. Collective."""
        if self._resume_point is None:
            return None
        state = self._state() | random_state()
        while not self._load_point(self._resume_point, state=state):
            if self.find_resume_point() is None:
                raise ConfigError(
                    f"{self._places.folder}: all steps were deleted while this run started; start it again"
                )
        return self._resume_point.progress

    def _load_point(self, point: "ResumePoint", *, state: dict[str, Tensor]) -> bool:
        """Fills the tensors; returns False if the step was deleted, or set aside as its part in a store is damaged."""
        from torchtitan_clone.checkpoint.load import load_resume_point

        try:
            return load_resume_point(point, checkpoint=self._options, state=state)
        except CorruptCheckpointError as problem:
            if point.progress is None or self._places.remote is None or self._options.load_only:
                raise ConfigError(f"{point.folder} is corrupted: {problem}; choose another step") from None
            step = point.progress.step
            set_aside(
                step, folder=self._places.remote, places=self._places, checkpoint=self._options, problem=str(problem)
            )
            return False

    def newest_step(self, *, below: int) -> int | None:
        """Returns the newest committed step below another, as this rank finds it, without a request to a store."""
        local = newest_complete_step(self._places.folder, below=below)
        stored = set[int]() if self._uploads is None else self._uploads.known
        return max((step for step in {*stored, *([] if local is None else [local])} if step < below), default=None)

    def go_back(self, step: int, *, leaves_newer: bool, before_load: Callable[[Progress], None]) -> None:
        """Loads a step, or an older one if that is corrupted; newer ones no longer count if `leaves_newer`. Collective.

        `before_load` gets the progress before the tensors change. ConfigError if no such step can be loaded.
        """
        from torchtitan_clone.checkpoint.load import find_resume_point

        options = replace(self._options, initial_load_path=None, exclude_from_loading=[], start_fresh=False)
        places = self._places
        self._retire_save()
        if self._uploads is not None:
            self._uploads.finish()
        steps = agree_on_steps(options, places=places)
        steps = replace(steps, to_resume=[each for each in steps.to_resume if each <= step])
        point = find_resume_point(options, places=places, steps=steps)
        if point is None or point.progress is None or point.progress.step > step:
            raise ConfigError(f"{places.folder}: step {step} was deleted while the run went back to it; start it again")
        self.saved_step = point.progress.step
        if leaves_newer:
            leave_newer(self.saved_step, places=places, why="after spikes", reason="for spikes")
            self._forget_newer()
        before_load(point.progress)
        if not self._load_point(point, state=self._state() | random_state()):
            raise ConfigError(f"{point.folder} is gone since the run went back to it; start it again")

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
        folder, uploads = self._places.folder, self._uploads
        is_uploaded = uploads is not None and (wait or uploads.is_wanted)
        save = self._start(
            progress, folder=folder, file=self._file, state=state, options=self._options, is_uploaded=is_uploaded,
            is_required=wait,
        )  # fmt: skip
        if save is None:
            return
        self._policy.record_save()
        if wait or self._options.async_mode == DIRECT:
            self.finish()
        save.report.blocked_seconds += time.perf_counter() - start

    def _start(
        self, progress: Progress, *, folder: Path, file: RankFile, state: dict[str, Tensor], options: Checkpoint,
        is_uploaded: bool = False, is_required: bool = True,
    ) -> Save | None:  # fmt: skip
        """Starts to save a step; None, with a warning, if a save is in progress or the disk is too full. Collective.

        An upload that is not required is left out, with a warning, while another is in progress.
        """
        save_id, error, is_uploading = self._agree(lack_of_space(folder, size=file.layout.total_bytes))
        if error is None and is_uploaded and is_uploading and not is_required:
            is_uploaded, what = False, "the upload of an earlier step is still in progress"
            if not self._keeps_local_steps:
                error = f"{what}, and nodes do not share {folder}; if this repeats, increase checkpoint.interval"
            elif dist.get_rank() == 0:
                logger.warning("step %d is not uploaded: %s", progress.step, what)
        if error is not None:
            if dist.get_rank() == 0:
                warn_of_failure(progress.step, error)
            return None
        upload = self._uploads.begin(progress.step, save_id=save_id) if self._uploads and is_uploaded else None
        save = Save(
            progress, folder=folder, save_id=save_id, file=file, checkpoint=options, group=self._places.group,
            upload=upload, is_folder_shared=self._is_folder_shared, peers=self._places.peers,
        )  # fmt: skip
        self._save = save
        if dist.get_rank() == 0:
            self._unreported.append(save)
        if file.buffer is not None:
            file.buffer.follow_current_stream()
            self._thread.submit(_log_errors, lambda: save.run(state, extra_files=self.extra_files))
        else:
            save.run(state, extra_files=self.extra_files)
        return save

    def _agree(self, error: str | None) -> tuple[str, str | None, bool]:
        """Exchanges the state of all ranks; returns the id of the next save, why it cannot start, and if one uploads.

        Collective.
        """
        is_busy = self._save is not None and not self._save.finished.is_set()
        is_uploading = self._uploads is not None and self._uploads.is_busy
        own = [is_busy, is_uploading, uuid.uuid4().hex[:12], error]
        answers = [value.items(count=4) for value in all_gather_json(own)]
        save_id = answers[0][2].text(pattern="[0-9a-f]{12}")
        error = next((text for *_, each in answers if (text := optional_text(each)) is not None), None)
        is_uploading = any(uploading.flag() for _, uploading, *_ in answers)
        if any(busy.flag() for busy, *_ in answers):
            error = "the previous save is still in progress; if this repeats, increase checkpoint.interval"
        else:
            self._retire_save()
        return save_id, error, is_uploading

    def _retire_save(self) -> None:
        """Waits for the save in progress, after which another may start or its step be given up."""
        self.finish()  # the outcome is announced, and the next save may fail
        if self._previous is not None and dist.get_rank() == 0:
            self._previous.votes.forget()  # all ranks have read its outcome before the last collective
        self._previous, self._save = self._save, None

    def wait_for_staging(self) -> None:
        """Waits until the save in progress has copied the state. Call it just before the state changes."""
        if self._save is not None and not self._save.finished.is_set():
            self._save.wait_for_staging()

    def finish(self) -> None:
        """Waits until the save in progress is committed or has failed, for a bounded time. Call it on every rank."""
        if self._save is not None and self._save.outcome() is None:
            self.saved_step = self._save.report.step

    def finish_uploads(
        self, *, beat: Callable[[], object] = lambda: None, is_out_of_time: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Waits until the newest step is in the object store, and returns why it is not; None without a store.

        Ends in a bounded time after the store has ceased to answer, and at once if a rank `is_out_of_time`; `beat` is
        called meanwhile. Collective.
        """
        if self._uploads is None:
            return None
        self._upload_saved_step()
        while True:
            answers = [each.items(count=2) for each in all_gather_json([self._uploads.is_busy, is_out_of_time()])]
            if not any(is_busy.flag() for is_busy, _ in answers):
                return optional_text(broadcast_json(self._uploads.failure))
            if any(is_late.flag() for _, is_late in answers):
                return OUT_OF_TIME
            beat()
            time.sleep(_SECONDS_BETWEEN_POLLS)

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
            mark_finished(self._places.folder, step=progress.step)
        return True

    def _save_model_only(self, progress: Progress) -> bool:
        """Saves parameters and buffers only, floating-point ones in export_dtype; returns if all could. Collective."""
        wanted = getattr(torch, self._options.export_dtype)
        model = {name: tensor for name, tensor in self._state().items() if name.startswith(MODEL)}
        model = {name: tensor.to(exported_dtype(name, tensor.dtype, wanted=wanted)) for name, tensor in model.items()}
        file = RankFile(lay_out(model), mode=DIRECT, timeout_seconds=self._options.writer_timeout_seconds)
        options = replace(self._options, keep_latest_k=0)
        save = self._start(
            progress, folder=self._places.folder / MODEL_ONLY_FOLDER, file=file, state=model, options=options
        )
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


def _open_remote(checkpoint: Checkpoint) -> "RemoteFolder | None":
    if (url := store_url(checkpoint)) is None or not checkpoint.enable:
        return None
    from torchtitan_clone.checkpoint.remote import open_remote

    return open_remote(url, timeout_seconds=checkpoint.store_timeout_seconds)


def _versions() -> str:
    versions = {"torchtitan_clone": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return json.dumps({**versions, "ranks": dist.get_world_size()}, indent=1)
