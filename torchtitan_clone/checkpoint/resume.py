"""Chooses the checkpoint that a run resumes from: the newest one that all ranks agree is intact."""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint import commit
from torchtitan_clone.checkpoint.commit import CorruptCheckpointError, Progress
from torchtitan_clone.checkpoint.index import Index
from torchtitan_clone.checkpoint.loading import agreed_errors, load_tensors, loadable_tensors
from torchtitan_clone.checkpoint.random_state import RNG, set_random_state
from torchtitan_clone.checkpoint.saving import MODEL_ONLY_FOLDER
from torchtitan_clone.checkpoint.verify import verify
from torchtitan_clone.comm.json_collectives import all_gather_json, broadcast_json
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import shown
from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

MODEL = "model/"
OPTIMIZER = "optimizer/"
OUTER = "outer/"


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint, and the groups of tensors to load from it; `progress` is None if the run starts anew."""

    folder: Path
    index: Index
    groups: tuple[str, ...]
    progress: Progress | None


def find_resume_point(checkpoint: Checkpoint, *, folder: Path, identity: str, group: str) -> ResumePoint | None:
    """Returns the newest intact step of steps_to_resume(), or initial_load_path. Collective.

    `group` is the name of the replica group, "" if there is one. ConfigError if what is asked for cannot be loaded.
    """
    if not checkpoint.enable:
        return _initial_point(checkpoint)
    steps, saved_steps, had_steps = _agree_on_steps(checkpoint, folder=folder, identity=identity, group=group)
    for step in reversed(steps):
        source = commit.step_folder(folder, step)
        try:
            index = verify(source, step=step, digests=checkpoint.verify == "full")
            with agreed_errors(source):
                progress = commit.progress_to_resume(source, checkpoint=checkpoint)
        except FileNotFoundError:
            return find_resume_point(checkpoint, folder=folder, identity=identity, group=group)
        except CorruptCheckpointError as problem:
            _quarantine(checkpoint, folder=folder, step=step, problem=str(problem))
            continue
        if not checkpoint.load_only:
            _quarantine_newer(folder, checkpoint=checkpoint, identity=identity, step=step)
        return ResumePoint(folder=source, index=index, groups=(MODEL, OPTIMIZER, OUTER, RNG), progress=progress)
    if checkpoint.load_step != -1:
        available = ", ".join(map(str, saved_steps)) or "none"
        what = f"checkpoint.load_step = {checkpoint.load_step}: {folder} has no complete checkpoint of this step"
        raise ConfigError(f"{what}; saved steps: {available}; choose one of them, or -1 for the newest")
    if had_steps and not checkpoint.start_fresh:
        remedy = "restore one, or set checkpoint.start_fresh = true to train from the first step"
        raise ConfigError(f"{folder}: no checkpoint is complete, for the reasons logged above; {remedy}")
    return _initial_point(checkpoint)


def load_resume_point(point: ResumePoint, *, checkpoint: Checkpoint, state: dict[str, Tensor]) -> bool:
    """Fills the tensors of the point's groups, except excluded ones. Collective. ConfigError if they do not match.

    Returns False if the checkpoint was deleted, as by another replica group that has saved newer ones.
    """
    excluded = tuple(f"{name.rstrip('/')}/" for name in checkpoint.exclude_from_loading)

    def is_loaded(name: str) -> bool:
        return name.startswith(point.groups) and not f"{name}/".startswith(excluded)

    def is_checked(name: str) -> bool:  # the number of ranks, each with its own random state, may have changed
        return is_loaded(name) and not name.startswith(RNG)

    _check_excluded(checkpoint.exclude_from_loading, names={*state, *point.index})
    wanted = {name: tensor for name, tensor in state.items() if is_loaded(name)}
    try:
        tensors = loadable_tensors(
            point.folder, wanted, index=point.index, is_checked=is_checked, allow_partial=checkpoint.allow_partial
        )
        load_tensors(point.folder, tensors, index=point.index)
    except FileNotFoundError:
        return False
    except CorruptCheckpointError as error:
        remedy = f"move {point.folder.name} out of its folder to use an older checkpoint"
        if checkpoint.verify == "sizes":
            remedy = 'set checkpoint.verify = "full" to check all bytes first and fall back to an older step'
        raise ConfigError(f"{point.folder}: {error}; {remedy}") from None
    set_random_state(tensors)
    loaded = " and ".join(group.rstrip("/") for group in point.groups if group != RNG)
    logger.info("loaded %s from %s", loaded, point.folder)
    if point.progress is not None:
        logger.info("resumed after step %d", point.progress.step)
        if checkpoint.load_step not in (-1, point.progress.step):
            logger.info("this run was rewound to checkpoint.load_step = %d before", checkpoint.load_step)
    return True


def _check_excluded(excluded: Sequence[str], *, names: Set[str]) -> None:
    """ConfigError for an excluded tensor that neither the checkpoint nor any rank has. Collective."""
    tensors = [name.rstrip("/") for name in excluded if "/" in name.rstrip("/")]
    if not tensors:
        return
    found = [any(f"{name}/".startswith(f"{wanted}/") for name in names) for wanted in tensors]
    answers = [answer.items(count=len(found)) for answer in all_gather_json(found)]
    for wanted, *are_found in zip(tensors, *answers, strict=True):
        if not any(each.flag() for each in are_found):
            rule = "neither the checkpoint nor this run has this tensor; name one that scripts/checkpoint.py show lists"
            raise ConfigError(f"checkpoint.exclude_from_loading = [{shown(wanted)}]: {rule}")


def _agree_on_steps(
    checkpoint: Checkpoint, *, folder: Path, identity: str, group: str
) -> tuple[list[int], list[int], bool]:
    """Returns the steps to resume from that rank 0 finds after cleaning up, all steps, and if there ever was one."""
    answer: list[object] = []
    with agreed_errors(folder):
        if dist.get_rank() == 0:
            for each in (folder, folder / MODEL_ONLY_FOLDER):
                commit.restore_replaced(each)
                if not checkpoint.load_only:
                    commit.delete_leftovers(each, group=group)
            saved = commit.committed_steps(folder)
            steps = commit.steps_to_resume(folder, checkpoint=checkpoint, identity=identity)
            answer = [steps, saved, bool(saved or commit.corrupt_steps(folder))]
    steps_of_run, saved_steps, had_steps = broadcast_json(answer).items(count=3)
    return steps_of_run.integers(), saved_steps.integers(), had_steps.flag()


def _quarantine(checkpoint: Checkpoint, *, folder: Path, step: int, problem: str) -> None:
    """Renames a step, unless this run never saves. Collective."""
    with agreed_errors(folder):
        if dist.get_rank() == 0:
            done = "ignored"
            if not checkpoint.load_only:
                done = f"renamed it to {commit.quarantine(folder, step=step, suffix='bad', reason=problem)}"
            logger.error("the checkpoint of step %d is corrupted: %s; %s", step, problem, done)


def _quarantine_newer(folder: Path, *, checkpoint: Checkpoint, identity: str, step: int) -> None:
    """With load_step, renames the steps after the one that is resumed, which the run will save with other values."""
    load_step = checkpoint.load_step
    with agreed_errors(folder):
        if dist.get_rank() == 0:
            newer = [each for each in commit.committed_steps(folder) if each > step and load_step != -1]
            for each in newer:
                target = commit.quarantine(folder, step=each, suffix="left", reason=f"for step {load_step}")
                logger.warning("checkpoint.load_step = %d: renamed the newer step %d to %s", load_step, each, target)
            if newer:
                commit.mark_unfinished(folder)
            commit.record_rewind(folder, checkpoint=checkpoint, identity=identity)


def _initial_point(checkpoint: Checkpoint) -> ResumePoint | None:
    if (found := commit.initial_folder(checkpoint)) is None:
        return None
    folder, step = found
    try:
        index = verify(folder, step=step, digests=checkpoint.verify == "full")
        with agreed_errors(folder):
            progress = commit.progress_to_resume(folder, checkpoint=checkpoint)
    except (CorruptCheckpointError, FileNotFoundError) as problem:
        why = f"{folder} is corrupted: {problem}; copy it again or choose another one"
        raise ConfigError(f"checkpoint.initial_load_path: {why}") from None
    if checkpoint.initial_load_model_only:
        return ResumePoint(folder=folder, index=index, groups=(MODEL,), progress=None)
    return ResumePoint(folder=folder, index=index, groups=(MODEL, OPTIMIZER, RNG), progress=progress)
