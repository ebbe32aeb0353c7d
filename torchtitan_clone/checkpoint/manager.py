"""Checkpoints: folders `step-N` that are either committed or do not exist.

Everything is written into `step-N.partial`, forced to disk, and renamed: the rename is the commit. Tensors go through
torch.distributed.checkpoint, which reshards them on load; all other state is JSON, so that it can be read by a person
and runs no code when it is loaded.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

_STEP = re.compile(r"step-(\d+)")
_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run has done so far, apart from its tensors."""

    step: int
    tokens_seen: int
    skipped_steps: int
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One attempt to save: `error` says why it failed, None means committed."""

    seconds: float
    error: str | None


def committed_steps(folder: Path) -> list[int]:
    """The steps that can be loaded, oldest first."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def read_progress(folder: Path, *, step: int) -> Progress:
    """What stands in the checkpoint of that step; needs no process group."""
    return Progress(**json.loads((folder / f"step-{step}" / _PROGRESS_FILE).read_text()))


class CheckpointManager:
    """Saves and loads the state of one run; every method but `newest_step` is a collective over all ranks.

    `state` returns the tensors to be saved by name, the very tensors that training uses: loading fills them in place.
    """

    def __init__(self, checkpoint: Checkpoint, *, folder: Path, state: Callable[[], dict[str, Tensor]]):
        self._options = checkpoint
        self._folder = folder
        self._state = state

    def newest_step(self) -> int | None:
        """The newest step that can be loaded; None where there is none."""
        steps = committed_steps(self._folder)
        return steps[-1] if steps else None

    def is_due(self, step: int) -> bool:
        """Whether the interval asks for a save after this step."""
        return self._options.enable and step % self._options.interval == 0

    def save(self, progress: Progress) -> SaveReport:
        """Saves and commits one step. A failure (full disk) is reported, not raised: older checkpoints stay whole."""
        start = time.perf_counter()
        error = _first_error(self._write(progress))
        if dist.get_rank() == 0:
            error = error or _described_failure(lambda: self._commit(progress))
        error = _first_error(error)
        seconds = time.perf_counter() - start
        if error is not None:
            logger.warning("step %d could not be saved: %s; training goes on without it", progress.step, error)
            if dist.get_rank() == 0:
                shutil.rmtree(self._partial(progress.step), ignore_errors=True)
        return SaveReport(seconds=seconds, error=error)

    def load(self, step: int) -> Progress:
        """Fills the tensors of `state` from that step and returns the rest."""
        import torch.distributed.checkpoint as dcp

        folder = self._folder / f"step-{step}"
        reader = dcp.FileSystemReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        state = self._all_tensors()
        absent = [name for name in state if name not in saved]
        if frozen := {name.rpartition("/")[0] for name in absent if name.startswith("optimizer/")}:
            logger.warning(
                "%d parameters were frozen at step %d: their optimizer states start from zero", len(frozen), step
            )
        state = {name: tensor for name, tensor in state.items() if name in saved or _must_be_saved(name)}
        dcp.load(state, storage_reader=reader)
        _set_rng(state)
        return read_progress(self._folder, step=step)

    def _all_tensors(self) -> dict[str, Tensor]:
        return self._state() | _rng_state()

    def _partial(self, step: int) -> Path:
        return self._folder / f"step-{step}.partial"

    def _write(self, progress: Progress) -> str | None:
        """Writes all files; returns what went wrong on this rank."""
        import torch.distributed.checkpoint as dcp

        partial = self._partial(progress.step)
        if dist.get_rank() == 0:
            error = _described_failure(lambda: _make_empty(partial))
        else:
            error = None
        if (error := _first_error(error)) is not None:
            return error
        writer = _build_writer(partial)
        return _described_failure(lambda: dcp.save(self._all_tensors(), storage_writer=writer))

    def _commit(self, progress: Progress) -> None:
        partial, final = self._partial(progress.step), self._folder / f"step-{progress.step}"
        with (partial / _PROGRESS_FILE).open("w") as file:
            json.dump(asdict(progress), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync_folder(self._folder)
        self._purge()

    def _purge(self) -> None:
        for leftover in self._folder.glob("step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        if self._options.keep_latest_k:
            for step in committed_steps(self._folder)[: -self._options.keep_latest_k]:
                shutil.rmtree(self._folder / f"step-{step}", ignore_errors=True)


def _build_writer(folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        """Reports what the disk said: torch's own archive error hides it, and is all that other ranks would see."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except (OSError, RuntimeError) as error:
                raise _disk_error(error) or error from None

    # One thread: with more, an error in a helper thread of torch's writer is lost (pytorch #191391).
    return Writer(folder, thread_count=1, sync_files=True)


def _disk_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _described_failure(action: Callable[[], object]) -> str | None:
    """Runs `action`; what the disk or the checkpoint writer had to say against it, None where nothing."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        action()
    except CheckpointException as error:
        causes = {str(cause[0]) for cause in error.failures.values()}
        return "; ".join(sorted(causes))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _first_error(error: str | None) -> str | None:
    """The first rank's error on all ranks."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((e for e in errors if e is not None), None)


def _must_be_saved(name: str) -> bool:
    """Ranks that did not exist have no generators in a checkpoint, parameters that were frozen no optimizer state."""
    return not name.startswith(("rng/", "optimizer/"))


def _rng_state() -> dict[str, Tensor]:
    """The state of torch's generators under names that carry the rank, or one rank's would overwrite the others'."""
    rank = dist.get_rank()
    states = {f"rng/cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng/cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_rng(state: Mapping[str, Tensor]) -> None:
    """Takes over the generators' states of this rank; a rank that did not exist at the save keeps its own."""
    for name, tensor in state.items():
        if name.startswith("rng/cpu/"):
            torch.set_rng_state(tensor)
        elif name.startswith("rng/cuda/"):
            torch.cuda.set_rng_state(tensor)
