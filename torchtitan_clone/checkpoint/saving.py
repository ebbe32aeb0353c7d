"""Runs saves one at a time, next to training.

All ranks start a save in one collective. Then each stages, writes and reports independently, in a thread with an
`async_mode`; rank 0 collects the reports and commits. A save that becomes due while another runs is skipped.
"""

import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.commit import PROGRESS_FILE, Progress, commit, purge, step_folder, write_manifest
from torchtitan_clone.checkpoint.layout import INDEX_FILE, plan_save
from torchtitan_clone.checkpoint.rank_file import DIRECT, RankFile
from torchtitan_clone.checkpoint.tensor_file import exported_dtype
from torchtitan_clone.checkpoint.writer import FileRecord, write_file
from torchtitan_clone.comm.json_collectives import all_gather_json, optional_text
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import shorten
from torchtitan_clone.files import format_bytes
from torchtitan_clone.torch_compat import default_store

logger = logging.getLogger("torchtitan_clone")

MODEL_ONLY_FOLDER = "model_only"
_SPACE_FACTOR = 1.02  # free disk space that a save requires, as a multiple of its size
_MAX_PAUSE_SECONDS = 0.05
_REMEDY = "check the log and the disk of that machine, or increase checkpoint.writer_timeout_seconds"
_TIMEOUT_FACTOR = 3  # two attempts of another rank's writer process and one of its thread


@dataclass(kw_only=True)
class SaveReport:
    """The result of one save: `error` is None if it was committed. Only rank 0 knows `seconds` and `error`.

    `seconds` is the time from start to commit, of which training waited for `blocked_seconds`.
    """

    step: int
    bytes: int
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    staging_seconds: float = 0.0
    error: str | None = None


class SaveCoordinator:
    """Exchanges reports on one save through the store of the process group: a collective would block training."""

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


class Save:
    """A save in progress. `staged` is set once the state may change, `finished` once this rank has done its share."""

    def __init__(
        self, progress: Progress, *, folder: Path, save_id: str, file: RankFile, checkpoint: Checkpoint, group: str
    ):
        self.report = SaveReport(step=progress.step, bytes=file.plan.total_bytes)
        self.file = file
        self.coordinator = SaveCoordinator(save_id)
        self.staged = Event()
        self.finished = Event()
        self._start = time.perf_counter()
        self._progress = progress
        self._folder = folder
        self._partial = folder / f"step-{progress.step}.partial-{group and f'{group}-'}{save_id}"
        self._options = checkpoint

    def run(self, state: dict[str, Tensor], *, extra_files: Mapping[str, str]) -> None:
        try:
            self._write(state)
            if dist.get_rank() == 0:
                self.report.error = self._collect_and_commit(extra_files)
                self.report.seconds = time.perf_counter() - self._start
                if self.report.error is not None:
                    _warn_of_failure(self.report.step, self.report.error)
                self.coordinator.announce(self.report.error)
        finally:
            self.staged.set()
            self.finished.set()

    def outcome(self) -> str | None:
        """Waits, for a bounded time, until rank 0 announces an error, or None for committed."""
        timeout_seconds = (_TIMEOUT_FACTOR + 1) * self._options.writer_timeout_seconds
        error = self.coordinator.outcome(timeout_seconds=timeout_seconds)
        if error is None:
            self.finished.wait(timeout_seconds)
        elif self.coordinator.outcome(timeout_seconds=0) == error:  # announced: no commit follows
            shutil.rmtree(self._partial, ignore_errors=True)  # that of this node, if it is not shared
        return error

    def _write(self, state: dict[str, Tensor]) -> None:
        try:
            if (buffer := self.file.buffer) is not None:
                start = time.perf_counter()
                buffer.stage(state)
                self.staged.set()
                buffer.wait_for_copies()
                self.report.staging_seconds = time.perf_counter() - start
            self._partial.mkdir(parents=True, exist_ok=True)
            record = self.file.write(self._partial / self.file.plan.file, state=state)
        except Exception as error:  # noqa: BLE001, rank 0 must learn of every error
            self.coordinator.report({}, error=f"rank {dist.get_rank()}: {_describe(error)}")
        else:
            self.coordinator.report({self.file.plan.file: record}, error=None)

    def _collect_and_commit(self, extra_files: Mapping[str, str]) -> str | None:
        try:
            files = self.coordinator.collect(timeout_seconds=_TIMEOUT_FACTOR * self._options.writer_timeout_seconds)
            self._commit(files, extra_files={**extra_files, INDEX_FILE: self.file.plan.index})
        except Exception as error:  # noqa: BLE001, the other ranks must learn of every error
            shutil.rmtree(self._partial, ignore_errors=True)
            return _describe(error)
        return None

    def _commit(self, files: dict[str, FileRecord], *, extra_files: Mapping[str, str]) -> None:
        final = step_folder(self._folder, self.report.step)
        sizes = {name: (self._partial / name).lstat().st_size for name in files if (self._partial / name).is_file()}
        if absent := [name for name, record in files.items() if sizes.get(name) != record.bytes]:
            what = f"rank 0 does not find {shorten(', '.join(absent))} in {self._partial} as other ranks wrote it"
            raise OSError(f"{what}; all nodes must share job.dump_folder")
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


class SaveRunner:
    """Runs the saves of one run; at most one is in progress."""

    def __init__(self, checkpoint: Checkpoint, *, extra_files: Mapping[str, str], group: str):
        self._options = checkpoint
        self._group = group
        self._extra_files = extra_files
        # A thread begins with the first GPU, where the streams of other ranks would open a context each.
        use_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=use_gpu)
        self._save: Save | None = None
        self._previous: Save | None = None
        self._committed_step: int | None = None
        self._unreported: list[Save] = []

    def run_in_background(self, action: Callable[[], None]) -> None:
        """Runs `action` in the thread of the saves, in the order of the calls."""
        self._thread.submit(_log_errors, action)

    def start(
        self, progress: Progress, *, folder: Path, file: RankFile, state: dict[str, Tensor], keeps_all: bool = False
    ) -> Save | None:
        """Starts to save a step; None, with a warning, if a save is in progress or the disk is too full. Collective."""
        save_id, error = self._agree(_lack_of_space(folder, size=file.plan.total_bytes))
        if error is not None:
            if dist.get_rank() == 0:
                _warn_of_failure(progress.step, error)
            return None
        options = replace(self._options, keep_latest_k=0) if keeps_all else self._options
        save = Save(progress, folder=folder, save_id=save_id, file=file, checkpoint=options, group=self._group)
        self._save = save
        if dist.get_rank() == 0:
            self._unreported.append(save)
        if file.buffer is not None:
            file.buffer.follow_current_stream()
            self.run_in_background(lambda: save.run(state, extra_files=self._extra_files))
        else:
            save.run(state, extra_files=self._extra_files)
        return save

    def wait_for_staging(self) -> None:
        if self._save is not None and not self._save.finished.is_set():
            start = time.perf_counter()
            self._save.staged.wait()
            if self._save.file.buffer is not None:
                self._save.file.buffer.hold_current_stream()
            self._save.report.blocked_seconds += time.perf_counter() - start

    def finish(self) -> int | None:
        """Waits for the last save, for a bounded time; returns the newest step that was committed, if any."""
        if self._save is not None and self._save.outcome() is None:
            self._committed_step = self._save.report.step
        return self._committed_step

    def reports(self) -> Iterator[SaveReport]:
        for save in [save for save in self._unreported if save.finished.is_set()]:
            self._unreported.remove(save)
            yield save.report

    def save_model_only(self, progress: Progress, *, folder: Path, state: Mapping[str, Tensor]) -> bool:
        """Saves parameters and buffers only, floating-point ones in export_dtype; returns if all could. Collective."""
        wanted = getattr(torch, self._options.export_dtype)
        model = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
        model = {name: tensor.to(exported_dtype(name, tensor.dtype, wanted=wanted)) for name, tensor in model.items()}
        file = RankFile(plan_save(model), mode=DIRECT, timeout_seconds=self._options.writer_timeout_seconds)
        save = self.start(progress, folder=folder / MODEL_ONLY_FOLDER, file=file, state=model, keeps_all=True)
        is_committed = save is not None and save.outcome() is None
        return all(answer.flag() for answer in all_gather_json(is_committed))

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
            self._previous.coordinator.forget()  # all ranks have read its outcome before this collective
        self._previous, self._save = self._save, None
        return save_id, error


def _lack_of_space(folder: Path, *, size: int) -> str | None:
    try:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:  # the other ranks wait for this one's answer
        return _describe(error)
    if free >= size * _SPACE_FACTOR:
        return None
    needs = f"it needs {format_bytes(size)}, and {existing} has {format_bytes(free)} free"
    return f"{needs}; free disk space or lower checkpoint.keep_latest_k"


def _wait_until(condition: Callable[[], bool], *, timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    pause_seconds = 0.001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
    return True


def _log_errors(action: Callable[[], None]) -> None:
    """Logs an exception, which would otherwise be lost in the thread."""
    try:
        action()
    except Exception:
        logger.exception("checkpoint: a background thread failed")


def _warn_of_failure(step: int, error: str) -> None:
    logger.warning("step %d could not be saved: %s; training continues without this checkpoint", step, error)


def _describe(error: Exception) -> str:
    """Returns the message of an error, with the file name of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
