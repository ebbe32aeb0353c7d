"""Runs saves one at a time, next to training.

All ranks start a save together, in a collective of about a millisecond. Then each rank independently stages its shards,
writes them and reports; rank 0 collects the reports and commits. With an `async_mode`, everything after the start
happens in a thread, and the optimizer waits only until the staging is done. A save that becomes due while another is in
progress is skipped; one that must not be skipped (the last, a permanent one, one before a stop) waits.
"""

import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.commit import Progress
from torchtitan_clone.checkpoint.full_tensor import exported_dtype
from torchtitan_clone.checkpoint.layout import Plan, plan_save
from torchtitan_clone.checkpoint.rank_file import DIRECT, RankFile
from torchtitan_clone.checkpoint.saving import Save, SaveReport, warn_of_failure
from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

MODEL_ONLY_FOLDER = "model_only"
"""Subfolder of the checkpoint folder that holds exports of the weights only."""
_SPACE_FACTOR = 1.02
"""Free disk space that a save requires, as a multiple of its size."""


class SaveRunner:
    """Runs the saves of one run; at most one is in progress."""

    def __init__(self, checkpoint: Checkpoint, *, extra_files: Mapping[str, str]):
        self._options = checkpoint
        self._extra_files = extra_files
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._save: Save | None = None
        self._unreported: list[Save] = []

    def run_in_background(self, action: Callable[[], None]) -> None:
        """Runs `action` in the thread that also runs the saves, in the order of the calls."""
        self._thread.submit(_log_errors, action)

    def start(
        self, progress: Progress, *, folder: Path, plan: Plan, file: RankFile, state: dict[str, Tensor]
    ) -> Save | None:
        """Starts to save a step; None, with a warning, if a save is in progress or the disk is too full. Collective."""
        save_id, error = self._agree(_lack_of_space(folder, size=plan.total_bytes))
        if error is not None:
            if dist.get_rank() == 0:
                warn_of_failure(progress.step, error)
            return None
        save = Save(
            progress,
            folder=folder,
            save_id=save_id,
            plan=plan,
            file=file,
            extra_files=self._extra_files,
            checkpoint=self._options,
        )
        self._save = save
        if dist.get_rank() == 0:
            self._unreported.append(save)
        if file.is_staged:
            file.follow_current_stream()
            self.run_in_background(lambda: save.run(state))
        else:
            save.run(state)
        return save

    def wait_for_staging(self) -> None:
        """Waits until the save in progress has copied the state."""
        if self._save is not None and not self._save.finished.is_set():
            start = time.perf_counter()
            self._save.staged.wait()
            self._save.file.hold_current_stream()
            self._save.blocked_seconds += time.perf_counter() - start

    def finish(self) -> int | None:
        """Waits for the last save, for a bounded time; returns its step if it was committed."""
        return self._save.step if self._save is not None and self._save.outcome() is None else None

    def reports(self) -> Iterator[SaveReport]:
        """Yields, on rank 0, a report for each save that ended since the last call."""
        for save in [save for save in self._unreported if save.finished.is_set()]:
            self._unreported.remove(save)
            yield save.report

    def _agree(self, error: str | None) -> tuple[str, str | None]:
        """Exchanges the state of all ranks; returns the id of the next save and why it cannot start. Collective."""
        is_busy = self._save is not None and not self._save.finished.is_set()
        answers: list[tuple[bool, str, str | None]] = [(is_busy, "", None)] * dist.get_world_size()
        dist.all_gather_object(answers, (is_busy, uuid.uuid4().hex[:12], error))
        _, save_id, error = answers[0]
        if any(busy for busy, _, _ in answers):
            return save_id, "the previous save is still in progress; if this repeats, increase checkpoint.interval"
        if self._save is not None and dist.get_rank() == 0:
            self._save.forget()
        self._save = None
        return save_id, error


def save_model_only(
    saves: SaveRunner, progress: Progress, *, folder: Path, state: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    """Writes a checkpoint of parameters and buffers only, with floating-point tensors in export_dtype. Collective."""
    wanted = getattr(torch, checkpoint.export_dtype)
    model = {
        name: tensor.to(exported_dtype(tensor.dtype, wanted=wanted))
        for name, tensor in state.items()
        if name.startswith("model/")
    }
    plan = plan_save(model)
    file = RankFile(plan.layout, mode=DIRECT, timeout_seconds=checkpoint.writer_timeout_seconds)
    if saves.start(progress, folder=folder / MODEL_ONLY_FOLDER, plan=plan, file=file, state=model) is not None:
        saves.finish()


def _lack_of_space(folder: Path, *, size: int) -> str | None:
    """Returns an error message if the disk has no room for `size` bytes."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free >= size * _SPACE_FACTOR:
        return None
    return (
        f"it needs {size / 2**30:.2f} GiB, and {existing} has {free / 2**30:.2f} GiB free; free disk space or lower "
        "checkpoint.keep_latest_k"
    )


def _log_errors(action: Callable[[], None]) -> None:
    """Logs an exception, which would otherwise be lost in the thread."""
    try:
        action()
    except Exception:
        logger.exception("checkpoint: a background thread failed")
