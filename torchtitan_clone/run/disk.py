"""Disk that the checkpoints of a run take: each of them, those that are kept at once, and what is free."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.config.urls import store_url
from torchtitan_clone.files import format_bytes
from torchtitan_clone.optim import optimizer_state_bytes
from torchtitan_clone.run.plan import RunPlan


def checkpoint_bytes(plan: RunPlan) -> int:
    """Returns the bytes of a checkpoint, of all ranks together: weights, optimizer state and averages."""
    dtype = getattr(torch, plan.config.training.dtype)
    trained = {name: weight.to(dtype) for name, weight in plan.trained_parameters.items()}
    state = optimizer_state_bytes(plan.config.optimizer, parameters=trained)
    averages = plan.parameter_count * torch.float32.itemsize if plan.config.ema.enable else 0
    return plan.parameter_count * dtype.itemsize + state + averages


def kept_checkpoints(checkpoint: Checkpoint, *, steps: int) -> int:
    """Returns how many checkpoints of a run of so many steps are on the disk at once, at most.

    The oldest is deleted after the newest is complete. With a store, those of its local folder are counted.
    """
    latest, interval, permanent = checkpoint.keep_latest_k, checkpoint.interval, checkpoint.keep_every
    if store_url(checkpoint):
        latest, interval, permanent = checkpoint.local_keep_latest_k, checkpoint.local_interval or interval, 0
    saves = math.ceil(steps / interval) + (steps // permanent if permanent else 0)
    return saves if latest == 0 else min(saves, latest + 1 + (steps // permanent if permanent else 0))


def describe_disk(plan: RunPlan) -> str:
    """Returns the size of a checkpoint, and of all that are kept at once."""
    checkpoint = plan.config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        return "none"
    size, count = checkpoint_bytes(plan), kept_checkpoints(checkpoint, steps=plan.config.training.steps)
    return f"{format_bytes(size)} each, at most {count:,} at once: {format_bytes(size * count)}"


def find_disk_notices(plan: RunPlan) -> Iterator[str]:
    """Yields a sentence if the checkpoints that a run keeps will not fit on the disk, with what is there of it."""
    checkpoint, folder = plan.config.checkpoint, plan.checkpoint_folder
    if not checkpoint.enable or checkpoint.load_only:
        return
    is_local = bool(store_url(checkpoint))  # each node has the files of its own ranks
    ranks = environment_integer("LOCAL_WORLD_SIZE", default=plan.world_size) if is_local else plan.world_size
    size = checkpoint_bytes(plan) * ranks // plan.world_size
    count = kept_checkpoints(checkpoint, steps=plan.config.training.steps)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size * count <= free + _size_of(folder):
        return
    option = "local_keep_latest_k" if is_local else "keep_latest_k"
    what = f"a checkpoint takes {format_bytes(size)}, and up to {count:,} of them {format_bytes(size * count)}"
    remedy = "lower it, raise the interval, or choose another job.dump_folder"
    yield (
        f"checkpoint.{option} = {getattr(checkpoint, option)}: {what}, but {shown(str(existing))} has "
        f"{format_bytes(free)} free; {remedy}"
    )


def _size_of(folder: Path) -> int:
    """Returns the bytes of the files in a folder, without those that another replica group deletes meanwhile."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(parent, name).lstat().st_size
    return size
