"""Chooses the checkpoint that a run resumes from: the newest one that all ranks agree is intact."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint import commit
from torchtitan_clone.checkpoint.commit import CorruptCheckpointError, Progress
from torchtitan_clone.checkpoint.loading import first_error, load_tensors, loadable_tensors
from torchtitan_clone.checkpoint.tensor_file import read_entries
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.ops.json_collectives import broadcast_json

logger = logging.getLogger("torchtitan_clone")

MODEL = "model/"
OPTIMIZER = "optimizer/"
OUTER = "outer/"
RNG = "rng/"
TENSOR_FILES = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint, and the groups of tensors to load from it; `progress` is None if the run starts anew."""

    folder: Path
    groups: tuple[str, ...]
    progress: Progress | None


def find_resume_point(checkpoint: Checkpoint, *, folder: Path, is_shared: bool) -> ResumePoint | None:
    """Returns the newest intact step, load_step or initial_load_path; ConfigError if it is corrupted. Collective."""
    steps, had_steps = _agree_on_steps(folder, is_shared=is_shared)
    for step in reversed([step for step in steps if checkpoint.load_step in (-1, step)]):
        if _verify_or_quarantine(checkpoint, folder=folder, step=step):
            if checkpoint.load_step != -1:
                _quarantine_newer(folder, step=step)
            source = commit.step_folder(folder, step)
            progress = commit.progress_to_resume(source, checkpoint=checkpoint)
            return ResumePoint(folder=source, groups=(MODEL, OPTIMIZER, OUTER, RNG), progress=progress)
    if checkpoint.load_step != -1:
        available = ", ".join(map(str, steps)) or "none"
        what = f"checkpoint.load_step = {checkpoint.load_step}: {folder} has no complete checkpoint of this step"
        raise ConfigError(f"{what}; saved steps: {available}; choose one of them, or -1 for the newest")
    if had_steps and not checkpoint.start_fresh:
        remedy = "restore one, or set checkpoint.start_fresh = true to train from the first step"
        raise ConfigError(f"{folder}: no checkpoint is complete, for the reasons logged above; {remedy}")
    return _initial_point(checkpoint)


def load_resume_point(point: ResumePoint, *, checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    """Fills the tensors of the point's groups, except excluded ones. Collective. ConfigError if they do not match."""
    excluded = tuple(f"{name.rstrip('/')}/" for name in checkpoint.exclude_from_loading)

    def is_loaded(name: str) -> bool:
        return name.startswith(point.groups) and not f"{name}/".startswith(excluded)

    def is_checked(name: str) -> bool:  # the number of ranks, each with its own random state, may have changed
        return is_loaded(name) and not name.startswith(RNG)

    wanted = {name: tensor for name, tensor in state.items() if is_loaded(name)}
    try:
        tensors = loadable_tensors(point.folder, wanted, is_checked=is_checked, allow_partial=checkpoint.allow_partial)
        load_tensors(point.folder, tensors)
    except CorruptCheckpointError as error:
        remedy = f"move {point.folder.name} out of its folder to use an older checkpoint"
        if checkpoint.verify == "sizes":
            remedy = 'set checkpoint.verify = "full" to check all bytes first and fall back to an older step'
        raise ConfigError(f"{point.folder}: {error}; {remedy}") from None
    _set_rng_state(tensors)
    loaded = " and ".join(group.rstrip("/") for group in point.groups if group != RNG)
    logger.info("loaded %s from %s", loaded, point.folder)
    if point.progress is not None:
        logger.info("resumed after step %d", point.progress.step)


def find_corruption(folder: Path, *, step: int | None, digests: bool) -> str | None:
    """Returns what is wrong with a checkpoint, or None; `digests` checks the bytes of tensors too. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    problem: str | None = None
    try:
        manifest = commit.check_sizes(folder, step=step)
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        for name in by_size[rank::world_size]:  # dealt in turn, to balance the reading
            if digests or not name.endswith(TENSOR_FILES):
                commit.check_digest(folder, name, manifest=manifest)
            if name.endswith(TENSOR_FILES):
                _check_header(folder, name)
    except CorruptCheckpointError as error:
        problem = str(error)
    return first_error(problem)


def _check_header(folder: Path, name: str) -> None:
    try:
        read_entries(folder / name)
    except OSError as error:
        raise CorruptCheckpointError(f"{name} is not a safetensors file: {error}") from None


def _agree_on_steps(folder: Path, *, is_shared: bool) -> tuple[list[int], bool]:
    """Returns the steps that rank 0 finds after cleaning up, and whether there ever was one."""
    answer: list[object] = []
    if dist.get_rank() == 0:
        commit.restore_replaced(folder)
        if not is_shared:  # a partial folder may belong to another replica group that is saving now
            commit.delete_leftovers(folder)
        steps = commit.committed_steps(folder)
        answer = [steps, bool(steps or commit.corrupt_steps(folder))]
    steps_of_run, had_steps = broadcast_json(answer).items(count=2)
    return steps_of_run.integers(), had_steps.flag()


def _verify_or_quarantine(checkpoint: Checkpoint, *, folder: Path, step: int) -> bool:
    problem = find_corruption(commit.step_folder(folder, step), step=step, digests=checkpoint.verify == "full")
    if problem is not None:
        if dist.get_rank() == 0:
            target = commit.quarantine(folder, step=step, suffix="bad", reason=problem)
            logger.error("the checkpoint of step %d is corrupted: %s; renamed it to %s", step, problem, target)
        dist.barrier()
    return problem is None


def _quarantine_newer(folder: Path, *, step: int) -> None:
    """Renames the steps after load_step: the run will save these steps again, with other values."""
    if dist.get_rank() == 0:
        for newer in [newer for newer in commit.committed_steps(folder) if newer > step]:
            target = commit.quarantine(folder, step=newer, suffix="left", reason=f"for step {step}")
            logger.warning("checkpoint.load_step = %d: renamed the newer step %d to %s", step, newer, target)
    dist.barrier()


def _initial_point(checkpoint: Checkpoint) -> ResumePoint | None:
    if (found := commit.initial_folder(checkpoint)) is None:
        return None
    folder, step = found
    problem = find_corruption(folder, step=step, digests=checkpoint.verify == "full")
    if problem is not None:
        why = f"{folder} is corrupted: {problem}; copy it again or choose another one"
        raise ConfigError(f"checkpoint.initial_load_path: {why}")
    if checkpoint.initial_load_model_only:
        return ResumePoint(folder=folder, groups=(MODEL,), progress=None)
    progress = commit.progress_to_resume(folder, checkpoint=checkpoint)
    return ResumePoint(folder=folder, groups=(MODEL, OPTIMIZER, RNG), progress=progress)


def rng_state() -> dict[str, Tensor]:
    """Returns copies of the states of this rank's random number generators, under names that contain the rank."""
    rank = dist.get_rank()
    states = {f"{RNG}cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RNG}cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def _set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Sets the states that were loaded; a rank that did not exist when they were saved keeps its own."""
    for name, tensor in state.items():
        if name.startswith(f"{RNG}cpu/"):
            torch.set_rng_state(tensor)
        elif name.startswith(f"{RNG}cuda/"):
            torch.cuda.set_rng_state(tensor)
