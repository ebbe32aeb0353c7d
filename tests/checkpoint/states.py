"""A state of every kind of tensor, whose values say which step they belong to, and ranks that save and load it."""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torchtitan_clone.checkpoint.commit import Progress
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint, Comm
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.testing.harness import run_ranks

# Uneven over 2, 3 and 4 ranks, matrices and vectors, no dimension, integers, other types, and nothing at all.
SHAPES = {
    "model/matrix": ((7, 5), torch.float32),
    "model/wide": ((4, 33), torch.bfloat16),
    "model/vector": ((9,), torch.float32),
    "model/empty": ((0, 3), torch.float32),
    "optimizer/matrix/exp_avg": ((7, 5), torch.float32),
    "optimizer/matrix/step": ((), torch.float32),
    "optimizer/flags": ((6,), torch.bool),
    "optimizer/counts": ((3,), torch.int64),
}
REPLICATED = ("optimizer/matrix/step", "optimizer/flags", "optimizer/counts")


def whole(name: str, *, step: int) -> torch.Tensor:
    """The values of one tensor at a step."""
    shape, dtype = SHAPES[name]
    seed = sorted(SHAPES).index(name) + 1000 * step
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)


def make_state(*, step: int) -> dict[str, torch.Tensor]:
    """All tensors at a step, sharded over all ranks, but for the small ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for name in SHAPES:
        values = whole(name, step=step)
        state[name] = values if name in REPLICATED else distribute_tensor(values, mesh, [Shard(0)])
    return state


def set_step(state: dict[str, torch.Tensor], *, step: int) -> None:
    """What an optimizer does: changes all values in place."""
    for name, tensor in state.items():
        values = whole(name, step=step)
        if isinstance(tensor, DTensor):
            local = distribute_tensor(values, tensor.device_mesh, tensor.placements).to_local()
            tensor.to_local().copy_(local)
        else:
            tensor.copy_(values)


def step_of(state: dict[str, torch.Tensor]) -> int | None:
    """The step that all values belong to; None where they are of several."""
    full = {}
    for name, tensor in state.items():
        full[name] = tensor.redistribute(placements=[Replicate()]).to_local() if isinstance(tensor, DTensor) else tensor
    for step in range(200):
        if torch.equal(full["model/vector"], whole("model/vector", step=step)):
            return step if all(torch.equal(full[name], whole(name, step=step)) for name in full) else None
    return None


@contextlib.contextmanager
def rank_of_a_group():
    """A process group, as training has one."""
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        yield


def progress_at(step: int) -> Progress:
    """What stands in progress.json."""
    return Progress(step=step, tokens_seen=100 * step, skipped_steps=0, data={"samples": 8 * step})


def manager_of(folder: Path, state: dict[str, torch.Tensor], config="", **options) -> CheckpointManager:
    """A manager with these options."""
    documents = {"config.toml": config}
    return CheckpointManager(Checkpoint(**options), folder=folder, state=lambda: state, documents=documents)


def save_steps(folder: Path, steps: list[int], options: dict, config: str) -> list[dict]:
    """A rank that saves these steps, one after the other, as training would; reports of rank 0."""
    with rank_of_a_group():
        state = make_state(step=0)
        manager = manager_of(folder, state, config=config, **options)
        reports = []
        for step in steps:
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            manager.finish()
            reports += [vars(report) for report in manager.reports()]
        manager.close()
    return reports


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a rank resumed from: `step` is that of the values, None where they are of several."""

    progress: Progress | None
    step: int | None
    log: str
    error: str | None


def log_lines() -> list[str]:
    """What is logged from now on in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan_clone").addHandler(handler)
    return lines


def load_each(folders: list[Path], options: dict) -> list[Loaded]:
    """A rank that resumes from each of these folders."""
    lines = log_lines()
    with rank_of_a_group():
        return [load_one(folder, options, lines) for folder in folders]


def load_one(folder: Path, options: dict, lines: list[str]) -> Loaded:
    """Resumes; `lines` is where the log goes."""
    lines.clear()
    state = make_state(step=199)
    try:
        manager = manager_of(folder, state, **options)
        progress = manager.find()
        manager.load()
    except ConfigError as error:
        return Loaded(progress=None, step=None, log="\n".join(lines), error=str(error))
    return Loaded(progress=progress, step=step_of(state), log="\n".join(lines), error=None)


def save(folder: Path, steps: list[int], *, world_size=1, config="", **options) -> list[dict]:
    """Saves steps on some ranks; rank 0's reports."""
    return run_ranks(save_steps, world_size, folder, steps, options, config)[0]


def load_all(folders: list[Path], *, world_size=1, **options) -> list[Loaded]:
    """Resumes from each folder on some ranks, which must agree; rank 0's answers."""
    answers = run_ranks(load_each, world_size, folders, options)
    for others in zip(*answers, strict=True):
        assert len({(loaded.progress and loaded.progress.step, loaded.step, loaded.error) for loaded in others}) == 1
    return answers[0]


def load(folder: Path, *, world_size=1, **options) -> Loaded:
    """Resumes from one folder."""
    return load_all([folder], world_size=world_size, **options)[0]
