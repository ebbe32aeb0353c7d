"""Saves and loads the state of one run: when, and what may run at the same time.

A save is begun by all ranks together, in a collective of a millisecond. Then each rank on its own stages its part,
writes it and reports it; rank 0 collects the reports and commits. With `async_mode` all but the beginning runs beside
the training, and the optimizer waits until the staging is done. One save is in flight at a time: a save that comes due
meanwhile is left out, and one that must not be (the last, a permanent one, one before a stop) waits.
"""

import json
import logging
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone import __version__
from torchtitan_clone.checkpoint.commit import Progress, mark_finished, newest_complete_step
from torchtitan_clone.checkpoint.rng import rng_state
from torchtitan_clone.config.schema import Checkpoint

if TYPE_CHECKING:  # the planner and the readers of torch are loaded when there is something to save or to load
    from torchtitan_clone.checkpoint.layout import Plan
    from torchtitan_clone.checkpoint.rank_file import RankFile
    from torchtitan_clone.checkpoint.resume import Source
    from torchtitan_clone.checkpoint.saving import Save, SaveReport

logger = logging.getLogger("torchtitan_clone")

MODEL_ONLY_FOLDER = "model_only"
"""Below the folder of the checkpoints: exports of the weights alone."""
_SPACE = 1.02
"""Free space that a save must find, as a multiple of its size."""


class CheckpointManager:
    """Saves and loads the state of one run.

    `state` returns the tensors to be saved by name, the very tensors that training uses: loading fills them in place.
    `documents` are text files that every checkpoint holds too, by name; `is_shared` says that other groups of ranks use
    the folder at the same time. What is a collective over all ranks says so.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        folder: Path,
        state: Callable[[], dict[str, Tensor]],
        documents: Mapping[str, str],
        is_shared: bool = False,
    ):
        self._options = checkpoint
        self._folder = folder
        self._state = state
        self._is_shared = is_shared
        self._documents = {**documents, "versions.json": json.dumps(_versions(), indent=1)}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._plan: Plan | None = None
        self._file: RankFile | None = None
        self._save: Save | None = None
        self._unreported: list[Save] = []
        self._source: Source | None = None
        self._saved_step = 0
        self._last_save = time.monotonic()

    @property
    def saved_step(self) -> int:
        """The newest step that is committed, or was gone on from; settled by `finish`."""
        return self._saved_step

    @property
    def saves(self) -> bool:
        """Whether this run saves at all."""
        return self._options.enable and not self._options.load_only

    @property
    def writer_pid(self) -> int | None:
        """Process id of this rank's writer, where there is one."""
        return self._file.writer_pid if self._file else None

    def newest_step(self) -> int | None:
        """The newest step in the folder that looks whole, whoever saved it."""
        return newest_complete_step(self._folder)

    def is_overdue(self) -> bool:
        """Whether interval_minutes have passed since the last save; the clocks of ranks differ, so one must decide."""
        minutes = self._options.interval_minutes
        return minutes is not None and time.monotonic() - self._last_save >= 60 * minutes

    def is_due(self, step: int, *, overdue: bool) -> bool:
        """Whether the policy asks for a save after this step."""
        options = self._options
        first = options.enable_first_step_checkpoint and step == 1
        return self.saves and (step % options.interval == 0 or self._is_permanent(step) or first or overdue)

    def find(self) -> Progress | None:
        """Where the run goes on: verifies until a step is whole, see resume.find_source. A collective."""
        from torchtitan_clone.checkpoint.resume import find_source

        self._source = find_source(self._options, folder=self._folder, is_shared=self._is_shared)
        if self._source is None or self._source.progress is None:
            return None
        self._saved_step = self._source.progress.step
        return self._source.progress

    def load(self) -> None:
        """Fills the tensors from what `find` has found, if anything. A collective."""
        if self._source is not None:
            from torchtitan_clone.checkpoint.resume import load_source

            load_source(self._source, checkpoint=self._options, state=self._all_tensors())
            if self._source.progress is not None:
                logger.info("resumed after step %d", self._source.progress.step)

    def prepare(self) -> None:
        """Agrees on who writes what, and makes ready beside the training what a first save would wait for.

        A collective. It holds until `forget_plan`; until then later calls do nothing.
        """
        if self._plan is not None or not self.saves:
            return
        from torchtitan_clone.checkpoint.layout import plan_save
        from torchtitan_clone.checkpoint.rank_file import RankFile

        options = self._options
        self._plan = plan_save(self._all_tensors())
        self._file = RankFile(
            self._plan.layout, mode=options.async_mode, timeout_seconds=options.writer_timeout_seconds
        )
        self._thread.submit(_logged, self._file.prepare)

    def forget_plan(self) -> None:
        """To be called by all ranks before names, shapes or splits of the state change: ends what is in flight."""
        self.finish()
        self.close()
        self._plan = self._file = None

    def save(self, progress: Progress, *, wait: bool = False) -> None:
        """Begins to save a step; with `wait` it ends what is in flight first, and returns when this one is committed.

        A collective. A failure (full disk) is reported and not raised: training goes on, and older steps stay whole.
        """
        start = time.perf_counter()
        wait = wait or self._is_permanent(progress.step)
        if wait:
            self.finish()
        self.prepare()
        assert self._plan is not None
        assert self._file is not None
        save = self._begin(progress, folder=self._folder, plan=self._plan, file=self._file)
        if save is None:
            return
        self._last_save = time.monotonic()
        self._run(save, self._all_tensors())
        if wait or self._options.async_mode == "disabled":
            self.finish()
        save.blocked_seconds += time.perf_counter() - start

    def wait_for_staging(self) -> None:
        """To be called just before the state changes: waits until a save in flight has its copy of it."""
        if self._save is not None and not self._save.over.is_set():
            start = time.perf_counter()
            self._save.staged.wait()
            self._save.file.hold_current_stream()
            self._save.blocked_seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Waits until the save in flight is committed or has failed; every rank calls it. It never waits for ever."""
        if self._save is not None and self._save.outcome() is None:
            self._saved_step = self._save.step

    def reports(self) -> Iterator["SaveReport"]:
        """The saves that came to their end since the last call; on rank 0."""
        for save in [save for save in self._unreported if save.over.is_set()]:
            self._unreported.remove(save)
            yield save.report

    def complete(self, progress: Progress) -> None:
        """The last step is saved: exports the weights where that is asked for, and marks the run. A collective."""
        if self._options.last_save_model_only:
            self._export(progress)
        if dist.get_rank() == 0:
            mark_finished(self._folder, step=progress.step)

    def close(self) -> None:
        """Ends the writer process and frees the staging memory; to be called after `finish`."""
        if self._file is not None:
            self._thread.submit(_logged, self._file.close)

    def _is_permanent(self, step: int) -> bool:
        return self._options.keep_every > 0 and step % self._options.keep_every == 0

    def _all_tensors(self) -> dict[str, Tensor]:
        return self._state() | rng_state()

    def _begin(self, progress: Progress, *, folder: Path, plan: "Plan", file: "RankFile") -> "Save | None":
        """Agrees with all ranks that a save begins; None, with a warning, where it cannot."""
        from torchtitan_clone.checkpoint.saving import Save, warn_of_failure

        is_busy = self._save is not None and not self._save.over.is_set()
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (is_busy, uuid.uuid4().hex[:12], _lack_of_space(folder, size=plan.total_bytes)))
        _, save_id, error = said[0]
        if any(busy for busy, _, _ in said):
            error = "the save before it is still in flight"
        elif self._save is not None:
            if dist.get_rank() == 0:
                self._save.forget()
            self._save = None
        if error is None:
            return Save(
                progress,
                folder=folder,
                save_id=save_id,
                plan=plan,
                file=file,
                documents=self._documents,
                checkpoint=self._options,
            )
        if dist.get_rank() == 0:
            warn_of_failure(progress.step, error)
        return None

    def _run(self, save: "Save", state: dict[str, Tensor]) -> None:
        self._save = save
        if dist.get_rank() == 0:
            self._unreported.append(save)
        if save.file.is_staged:
            save.file.follow_current_stream()
            self._thread.submit(_logged, lambda: save.run(state))
        else:
            save.run(state)

    def _export(self, progress: Progress) -> None:
        """A checkpoint of the weights alone, in export_dtype."""
        from torchtitan_clone.checkpoint.layout import plan_save
        from torchtitan_clone.checkpoint.rank_file import DIRECT, RankFile

        dtype = getattr(torch, self._options.export_dtype)
        state = {name: tensor.to(dtype) for name, tensor in self._state().items() if name.startswith("model/")}
        plan = plan_save(state)
        file = RankFile(plan.layout, mode=DIRECT, timeout_seconds=self._options.writer_timeout_seconds)
        save = self._begin(progress, folder=self._folder / MODEL_ONLY_FOLDER, plan=plan, file=file)
        if save is not None:
            self._run(save, state)
            self.finish()


def _lack_of_space(folder: Path, *, size: int) -> str | None:
    """What is to be said where the disk has no room for so many bytes."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free >= size * _SPACE:
        return None
    return f"it needs {size / 2**30:.2f} GiB, and {existing} has {free / 2**30:.2f} GiB left"


def _versions() -> dict[str, Any]:
    return {
        "torchtitan_clone": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": dist.get_world_size(),
    }


def _logged(action: Callable[[], None]) -> None:
    """An error in a thread would be heard of by nobody."""
    try:
        action()
    except Exception:
        logger.exception("checkpoint: a background thread failed")
