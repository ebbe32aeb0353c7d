"""What all ranks decide together about checkpoints: which steps there are, which to set aside, and what failed."""

import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from torchtitan_clone.checkpoint import folder as folders
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError, StoredStep
from torchtitan_clone.comm.json_collectives import all_gather_json, broadcast_json, optional_text
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import Value, shorten

if TYPE_CHECKING:
    from torchtitan_clone.checkpoint.remote import RemoteFolder

logger = logging.getLogger("torchtitan_clone")


class NodeCopies(Protocol):
    """What copies files between the nodes of a run that do not share a folder: peers.Peers."""

    @property
    def leads(self) -> bool: ...
    def exchange(self, folder: Path, *, own: str | None) -> None: ...
    def survey(self, folder: Path) -> set[int]: ...
    def complete(self, folder: Path, *, step: int, digests: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the steps of a run are: its folder and, if there is one, an object store.

    `identity` is text that tells the run from others, `group` the name of this replica group, "" if there is one.
    `peers` are nodes that have folders of their own and copy files to one another.
    """

    folder: Path
    identity: str = ""
    group: str = ""
    remote: "RemoteFolder | None" = None
    peers: "NodeCopies | None" = None

    @property
    def leads(self) -> bool:
        """Whether this rank renames and deletes steps in the folder that it sees."""
        return dist.get_rank() == 0 if self.peers is None else self.peers.leads


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps in a folder: those that a run may resume from, and all that are committed, oldest first.

    `had_any` also counts steps that were renamed because they were corrupted. `local` are those in the folder, and
    `stored` those in the object store, if there is one.
    """

    to_resume: list[int]
    committed: list[int]
    had_any: bool
    local: Set[int] = frozenset()
    stored: Set[int] = frozenset()


def agree_on_steps(checkpoint: Checkpoint, *, places: Places) -> Steps:
    """Returns what rank 0 finds after it has cleaned up; nothing without checkpoint.enable. Collective.

    With an object store, a step counts as local only if each rank finds it or, of nodes that copy files to one another,
    each file is on one of them.
    """
    folder, remote = places.folder, places.remote
    if not checkpoint.enable:
        return Steps(to_resume=[], committed=[], had_any=False)
    answer: list[object] = []
    local = None if remote is None else _local_steps(checkpoint, places=places)
    with agreed_errors(remote or folder):
        if dist.get_rank() == 0:
            in_store: list[int] = []
            if remote is None or local is None:
                _clean_up(checkpoint, places=places)
                found = folders.committed_steps(folder)
            else:
                in_store = remote.committed_steps()
                found = sorted({*local, *in_store})
                if checkpoint.load_step != -1:
                    remote.fetch_rewind(folder)
            resumable = folders.steps_to_resume(found, folder=folder, checkpoint=checkpoint, identity=places.identity)
            had_any = bool(found or folders.corrupt_steps(folder) or (remote and remote.has_corrupt_steps()))
            answer = [resumable, found, had_any, in_store]
    to_resume, committed, any_step, stored = broadcast_json(answer).items(count=4)
    return Steps(
        to_resume=to_resume.integers(),
        committed=committed.integers(),
        had_any=any_step.flag(),
        local=frozenset(committed.integers() if local is None else local),
        stored=frozenset(stored.integers()),
    )


def _local_steps(checkpoint: Checkpoint, *, places: Places) -> set[int]:
    """Returns the steps that each rank finds in its folder, which one of each node cleans up. Collective."""
    found: set[int] = set()
    with agreed_errors(places.folder):
        if environment_integer("LOCAL_RANK", default=0) == 0:
            _clean_up(checkpoint, places=places)
        found |= {*folders.committed_steps(places.folder)}
    if places.peers is not None:
        return places.peers.survey(places.folder)
    return found.intersection(*(each.integers() for each in gather(sorted(found))))


def _clean_up(checkpoint: Checkpoint, *, places: Places) -> None:
    for each in (places.folder, places.folder / folders.MODEL_ONLY_FOLDER):
        folders.restore_replaced(each)
        if not checkpoint.load_only:
            folders.delete_leftovers(each, group=places.group)


def find_leaders(folder: Path) -> list[int]:
    """Returns for each rank the first one that sees the same folder, which is created if it is missing. Collective."""
    mark = folder / f"step-0.partial-{broadcast_json(uuid.uuid4().hex).text(pattern='[0-9a-f]+')}"
    with agreed_errors(folder):
        mark.mkdir(parents=True, exist_ok=True)
        (mark / str(dist.get_rank())).touch()
    # All have marked it: errors are agreed on.
    leaders = [each.integer() for each in gather(min(int(each.name) for each in mark.iterdir()))]
    if leaders[dist.get_rank()] == dist.get_rank():
        shutil.rmtree(mark, ignore_errors=True)
    return leaders


def set_aside(
    step: int, *, folder: "Path | RemoteFolder", places: Places, checkpoint: Checkpoint, problem: str
) -> None:
    """Renames a corrupted step in one of the places, unless this run never saves. Collective."""
    with agreed_errors(folder):
        leads = places.leads if isinstance(folder, Path) else dist.get_rank() == 0
        if leads:
            done = "ignored"
            if not checkpoint.load_only:
                done = f"renamed it to {_quarantine(folder, step=step, suffix='bad', reason=problem)}"
            where = "" if isinstance(folder, Path) else f" in {folder}"
            logger.error("the checkpoint of step %d%s is corrupted: %s; %s", step, where, problem, done)


def _quarantine(folder: "Path | RemoteFolder", *, step: int, suffix: str, reason: str) -> object:
    if isinstance(folder, Path):
        return folders.quarantine(folder, step=step, suffix=suffix, reason=reason)
    return folder.set_aside(step, suffix=suffix, reason=reason)


def set_newer_aside(step: int, *, places: Places, checkpoint: Checkpoint) -> None:
    """With load_step, renames the steps after this one, which the run will save with other values. Collective."""
    load_step = checkpoint.load_step
    if load_step != -1:
        why = f"checkpoint.load_step = {load_step}"
        leave_newer(step, places=places, why=why, reason=f"for step {load_step}")
    with agreed_errors(places.remote or places.folder):
        if dist.get_rank() == 0:
            folders.record_rewind(places.folder, checkpoint=checkpoint, identity=places.identity)
            if places.remote:
                places.remote.store_rewind(places.folder)


def leave_newer(step: int, *, places: Places, why: str, reason: str) -> None:
    """Renames the steps after this one, from which no start resumes any more; with `reason` in the name. Collective."""
    folder, remote = places.folder, places.remote
    with agreed_errors(remote or folder):
        newer: list[tuple[Path | RemoteFolder, int]] = []
        if places.leads:
            newer += [(folder, each) for each in folders.committed_steps(folder) if each > step]
        if remote and dist.get_rank() == 0:
            newer += [(remote, each) for each in remote.committed_steps() if each > step]
        for place, each in newer:
            target = _quarantine(place, step=each, suffix="left", reason=reason)
            logger.warning("%s: renamed the newer step %d to %s", why, each, target)
        if newer:
            folders.mark_unfinished(folder)


@contextmanager
def agreed_errors(folder: "Path | StoredStep | RemoteFolder") -> Iterator[None]:
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
        is_there = not isinstance(folder, Path) or os.path.lexists(folder)
        absent = [rank for rank, exists in enumerate(gather(is_there)) if not exists.flag()]
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
