"""What all ranks decide together about checkpoints: which steps there are, which to set aside, and what failed."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torchtitan_clone.checkpoint import folder as folders
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError
from torchtitan_clone.comm.json_collectives import all_gather_json, broadcast_json, optional_text
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import Value, shorten

logger = logging.getLogger("torchtitan_clone")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps in a folder: those that a run may resume from, and all that are committed, oldest first.

    `had_any` also counts steps that were renamed because they were corrupted.
    """

    to_resume: list[int]
    committed: list[int]
    had_any: bool


def agree_on_steps(checkpoint: Checkpoint, *, folder: Path, identity: str, group: str) -> Steps:
    """Returns what rank 0 finds after it has cleaned up; nothing without checkpoint.enable. Collective.

    `group` is the name of the replica group, "" if there is one.
    """
    if not checkpoint.enable:
        return Steps(to_resume=[], committed=[], had_any=False)
    answer: list[object] = []
    with agreed_errors(folder):
        if dist.get_rank() == 0:
            for each in (folder, folder / folders.MODEL_ONLY_FOLDER):
                folders.restore_replaced(each)
                if not checkpoint.load_only:
                    folders.delete_leftovers(each, group=group)
            committed = folders.committed_steps(folder)
            to_resume = folders.steps_to_resume(folder, checkpoint=checkpoint, identity=identity)
            answer = [to_resume, committed, bool(committed or folders.corrupt_steps(folder))]
    to_resume, committed, had_any = broadcast_json(answer).items(count=3)
    return Steps(to_resume=to_resume.integers(), committed=committed.integers(), had_any=had_any.flag())


def set_aside(step: int, *, folder: Path, checkpoint: Checkpoint, problem: str) -> None:
    """Renames a corrupted step, unless this run never saves. Collective."""
    with agreed_errors(folder):
        if dist.get_rank() == 0:
            done = "ignored"
            if not checkpoint.load_only:
                done = f"renamed it to {folders.quarantine(folder, step=step, suffix='bad', reason=problem)}"
            logger.error("the checkpoint of step %d is corrupted: %s; %s", step, problem, done)


def set_newer_aside(step: int, *, folder: Path, checkpoint: Checkpoint, identity: str) -> None:
    """With load_step, renames the steps after this one, which the run will save with other values. Collective."""
    load_step = checkpoint.load_step
    with agreed_errors(folder):
        if dist.get_rank() == 0:
            newer = [each for each in folders.committed_steps(folder) if each > step and load_step != -1]
            for each in newer:
                target = folders.quarantine(folder, step=each, suffix="left", reason=f"for step {load_step}")
                logger.warning("checkpoint.load_step = %d: renamed the newer step %d to %s", load_step, each, target)
            if newer:
                folders.mark_unfinished(folder)
            folders.record_rewind(folder, checkpoint=checkpoint, identity=identity)


@contextmanager
def agreed_errors(folder: Path) -> Iterator[None]:
    """Raises on all ranks what one raises: CorruptCheckpointError, ConfigError for OSError, or FileNotFoundError.

    The last one if rank 0, which lists the steps, does not find the folder: it was deleted. ConfigError also if another
    rank does not: its node does not share the folder. Collective; without a process group, for a single process.
    """
    corrupt = unusable = None
    try:
        yield
    except CorruptCheckpointError as error:
        corrupt = str(error)
    except (ConfigError, OSError) as error:
        unusable = str(error)
        if isinstance(error, OSError):
            unusable = f"{folder} cannot be read or changed: {error}; try again, or move it away to use an older step"
    corrupt, unusable = first_error(corrupt), first_error(unusable)
    if corrupt or unusable:
        absent = [rank for rank, exists in enumerate(gather(os.path.lexists(folder))) if not exists.flag()]
        if 0 in absent:
            raise FileNotFoundError(f"{folder} does not exist")
        if absent and not unusable:
            rule = "all nodes must share job.dump_folder, and checkpoint.initial_load_path if it is set"
            unusable = f"rank 0 finds {folder}, but ranks {shorten(str(absent))} do not; {rule}"
    if unusable or corrupt:
        raise ConfigError(unusable) if unusable else CorruptCheckpointError(corrupt)


def first_error(error: str | None, *, group: dist.ProcessGroup | None = None) -> str | None:
    """Returns the error of the first rank that has one, on all ranks. Collective."""
    errors = [optional_text(each) for each in gather(error, group=group)]
    return next((each for each in errors if each is not None), None)


def gather(value: object, *, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Returns the values of all ranks, or this one without a process group. Collective."""
    return all_gather_json(value, group=group) if dist.is_initialized() else [Value(value, where="value")]
