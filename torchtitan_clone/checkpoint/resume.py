"""Where a run goes on from: the newest step that all ranks agree is whole.

A step that is not is set aside under a name that says why, and the next older one is tried. A state that does not fit
the model is an error, not damage.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.commit import (
    DamagedError,
    Progress,
    bad_steps,
    check_digest,
    check_sizes,
    clean,
    committed_steps,
    files_of_rank,
    initial_folder,
    quarantine,
    read_progress,
    recover,
    step_folder,
    without_excluded,
)
from torchtitan_clone.checkpoint.loading import load_tensors, matching
from torchtitan_clone.checkpoint.rng import PREFIX as RNG
from torchtitan_clone.checkpoint.rng import set_rng_state
from torchtitan_clone.checkpoint.tensor_file import open_tensors
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

MODEL, OPTIMIZER, OUTER = "model/", "optimizer/", "outer/"
TENSORS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that was verified, and what of it is to be loaded."""

    folder: Path
    groups: tuple[str, ...]
    progress: Progress | None


def find_source(checkpoint: Checkpoint, *, folder: Path, is_shared: bool) -> Source | None:
    """The newest step that is whole, or load_step, or else initial_load_path; a collective over all ranks.

    ConfigError: steps exist and none is whole, or what is asked for by name is not. `is_shared`: other groups of ranks
    save there now.
    """
    steps, had_steps = _agreed_steps(folder, load_step=checkpoint.load_step, is_shared=is_shared)
    for step in reversed(steps):
        if _is_complete_or_quarantined(checkpoint, folder=folder, step=step):
            if checkpoint.load_step != -1:
                _quarantine_newer(folder, step=step)
            where = step_folder(folder, step)
            groups = (MODEL, OPTIMIZER, OUTER, RNG)
            return Source(folder=where, groups=groups, progress=_progress_of(checkpoint, where))
    if checkpoint.load_step != -1:
        raise ConfigError(f"checkpoint.load_step = {checkpoint.load_step}: {folder} has no whole checkpoint of it")
    if had_steps and not checkpoint.start_fresh:
        raise ConfigError(
            f"{folder} has checkpoints, but none of them is whole, see above; bring one back, or set "
            "checkpoint.start_fresh = true to begin with the first step"
        )
    initial = initial_folder(checkpoint)
    return _initial_source(checkpoint, folder=initial[0], step=initial[1]) if initial else None


def load_source(source: Source, *, checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
    """Fills the tensors of the groups, but for those that are excluded; a collective over all ranks.

    ConfigError where they do not fit, or where the disk cannot read what it could read before.
    """
    excluded = tuple(f"{name.rstrip('/')}/" for name in checkpoint.exclude_from_loading)

    def is_loaded(name: str) -> bool:
        return name.startswith(source.groups) and not f"{name}/".startswith(excluded)

    wanted = {name: tensor for name, tensor in state.items() if is_loaded(name)}
    try:
        fitting = matching(
            source.folder,
            wanted,
            # Ranks may have come and gone, each with its random numbers.
            counts=lambda name: is_loaded(name) and not name.startswith(RNG),
            allow_partial=checkpoint.allow_partial,
        )
        load_tensors(source.folder, fitting)
    except DamagedError as error:
        raise ConfigError(
            f'{source.folder}: {error}; with checkpoint.verify = "full" it is passed over for an older step'
        ) from None
    set_rng_state(fitting)
    what = " and ".join(group.rstrip("/") for group in source.groups if group != RNG)
    logger.info("loaded %s from %s", what, source.folder)


def find_corruption(folder: Path, *, step: int | None, digests: bool) -> str | None:
    """What is wrong with a checkpoint, None where nothing; one verdict of all ranks, who share the reading."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    damage = None
    try:
        manifest = check_sizes(folder, step=step)
        for name in files_of_rank(manifest, rank=rank, world_size=world_size):
            if digests or not name.endswith(TENSORS):
                check_digest(folder, name, manifest=manifest)
            if name.endswith(TENSORS):
                _check_header(folder, name)
    except DamagedError as error:
        damage = str(error)
    verdicts: list[Any] = [damage]
    if dist.is_initialized():
        verdicts = [None] * world_size
        dist.all_gather_object(verdicts, damage)
    return next((text for text in verdicts if text is not None), None)


def _check_header(folder: Path, name: str) -> None:
    """DamagedError where a file of tensors does not begin as one, whatever the manifest says."""
    from safetensors import SafetensorError

    try:
        with open_tensors(folder / name):
            pass
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{name} is no file of tensors: {error}") from None


def _agreed_steps(folder: Path, *, load_step: int, is_shared: bool) -> tuple[list[int], bool]:
    """The steps to try, as rank 0 sees them after it has cleaned up, and whether there ever was one."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        recover(folder)
        if not is_shared:  # else what looks left behind may be what another group is writing
            clean(folder)
        steps = committed_steps(folder)
        answer = [[step for step in steps if load_step in (-1, step)], bool(steps or bad_steps(folder))]
    dist.broadcast_object_list(answer)
    return answer[0], answer[1]


def _is_complete_or_quarantined(checkpoint: Checkpoint, *, folder: Path, step: int) -> bool:
    damage = find_corruption(step_folder(folder, step), step=step, digests=checkpoint.verify == "full")
    if damage is not None:
        if dist.get_rank() == 0:
            target = quarantine(folder, step=step, suffix="bad", reason=damage)
            logger.error("the checkpoint of step %d is damaged: %s; it is now %s", step, damage, target)
        dist.barrier()
    return damage is None


def _quarantine_newer(folder: Path, *, step: int) -> None:
    """With load_step there may be newer steps, of a future that will now be another."""
    if dist.get_rank() == 0:
        for newer in [newer for newer in committed_steps(folder) if newer > step]:
            target = quarantine(folder, step=newer, suffix="left", reason=f"for step {step}")
            logger.warning("checkpoint.load_step = %d: the newer step %d is now %s", step, newer, target)
    dist.barrier()


def _initial_source(checkpoint: Checkpoint, *, folder: Path, step: int | None) -> Source:
    """Another run's checkpoint: its weights, or with initial_load_model_only = false all of it. It is left as it is."""
    damage = find_corruption(folder, step=step, digests=checkpoint.verify == "full")
    if damage is not None:
        raise ConfigError(f"checkpoint.initial_load_path: {folder} is damaged: {damage}")
    if checkpoint.initial_load_model_only:
        return Source(folder=folder, groups=(MODEL,), progress=None)
    return Source(folder=folder, groups=(MODEL, OPTIMIZER, RNG), progress=_progress_of(checkpoint, folder))


def _progress_of(checkpoint: Checkpoint, folder: Path) -> Progress:
    return without_excluded(read_progress(folder), checkpoint=checkpoint)
