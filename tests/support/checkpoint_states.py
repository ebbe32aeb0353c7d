"""Training states whose values reveal their step, and functions that save and load them on real ranks."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.harness import run_ranks
from torchtitan_clone.checkpoint.format import read_index
from torchtitan_clone.checkpoint.load import load_tensors
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.checkpoint.save import SaveReport
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint, Comm
from torchtitan_clone.parallel.runtime import Launch, process_group

# Uneven over 2, 3 and 4 ranks; matrices, vectors, 0-dim and empty tensors; integers, booleans and other types.
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
MAX_STEP = 200


def values_at(name: str, *, step: int) -> Tensor:
    """Returns the full values of one tensor at a step."""
    shape, dtype = SHAPES[name]
    seed = sorted(SHAPES).index(name) + 1000 * step
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)


def make_state(*, step: int) -> dict[str, Tensor]:
    """Returns all tensors at a step, sharded over all ranks except for the REPLICATED ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = {name: values_at(name, step=step) for name in SHAPES}
    sharded = {name: distribute_tensor(values[name], mesh, [Shard(0)]) for name in SHAPES if name not in REPLICATED}
    return values | sharded


def set_step(state: Mapping[str, Tensor], *, step: int) -> None:
    """Changes all values in place to those of a step, as an optimizer does."""
    for name, tensor in state.items():
        values = values_at(name, step=step)
        if isinstance(tensor, DTensor):
            values = distribute_tensor(values, tensor.device_mesh, tensor.placements).to_local()
            tensor = tensor.to_local()
        tensor.copy_(values)


def step_of(state: Mapping[str, Tensor]) -> int | None:
    """Returns the step that all values belong to; None if they belong to several."""
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}
    for step in range(MAX_STEP):
        if torch.equal(full["model/vector"], values_at("model/vector", step=step)):
            return step if all(torch.equal(full[name], values_at(name, step=step)) for name in full) else None
    return None


def read_tensors(folder: Path, names: Mapping[str, object] | Sequence[str] | None = None) -> dict[str, Tensor]:
    """Returns full tensors of a checkpoint on the CPU, all or those of these names; needs no process group."""
    index = read_index(folder)
    state = {name: index[name].empty() for name in (index if names is None else names)}
    load_tensors(folder, state, index=index)
    return state


class SlowState(dict[str, Tensor]):
    """A state that takes `seconds` to read once, so that training can overtake a copy of it."""

    def __init__(self, tensors: Mapping[str, Tensor], *, seconds: float):
        super().__init__(tensors)
        self._seconds = seconds

    def __getitem__(self, name: str) -> Tensor:
        time.sleep(self._seconds / len(self))
        return super().__getitem__(name)

    def __or__(self, other: Mapping[str, Tensor]) -> "SlowState":  # pyright: ignore[reportIncompatibleMethodOverride]
        return SlowState(dict(self.items()) | dict(other.items()), seconds=self._seconds)


def rank_of_a_group() -> AbstractContextManager[None]:
    """Returns a context with a process group, as training has one."""
    return process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu"))


def progress_at(step: int) -> Progress:
    """Returns the content of progress.json at a step."""
    return Progress(step=step, tokens_seen=100 * step, skipped_steps=0, data={"samples": 8 * step})


def build_manager(
    folder: Path,
    state: dict[str, Tensor] | Callable[[], dict[str, Tensor]],
    *,
    config: str = "",
    **options: object,
) -> CheckpointManager:
    """Returns a manager with these options of `[checkpoint]`; `identity` is one of the manager."""
    identity = str(options.pop("identity", ""))
    return CheckpointManager(
        Checkpoint(**options),  # pyright: ignore[reportArgumentType]
        folder=folder,
        state=state if callable(state) else lambda: state,
        config=config,
        identity=identity,
    )


def started_writer(manager: CheckpointManager) -> int:
    """Prepares the first save and returns the id of the writer process, which starts in the background."""
    manager.prepare()
    deadline = time.monotonic() + 60
    while manager.writer_pid is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return manager.writer_pid


def save_steps(folder: Path, steps: Sequence[int], options: Mapping[str, object], config: str) -> list[SaveReport]:
    """Saves these steps one after another, as training does; the reports on rank 0."""
    with rank_of_a_group():
        state = make_state(step=0)
        manager = build_manager(folder, state, config=config, **options)
        reports: list[SaveReport] = []
        for step in steps:
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            manager.finish()
            reports += manager.reports()
        manager.close()
    return reports


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a rank resumed from; `step` is that of the values, None if they belong to several."""

    progress: Progress | None
    step: int | None
    log: str
    error: str | None


def log_lines() -> list[str]:
    """Returns a list that receives everything this process logs from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchtitan_clone").addHandler(handler)
    return lines


def load_each(folders: Sequence[Path], options: Mapping[str, object]) -> list[Loaded]:
    """Resumes from each of these folders in turn."""
    lines = log_lines()
    found = []
    with rank_of_a_group():
        for folder in folders:
            lines.clear()
            state = make_state(step=MAX_STEP - 1)
            try:
                manager = build_manager(folder, state, config="", **options)
                progress = manager.find_resume_point()
                manager.load()
                found.append(Loaded(progress=progress, step=step_of(state), log="\n".join(lines), error=None))
            except ConfigError as error:
                found.append(Loaded(progress=None, step=None, log="\n".join(lines), error=str(error)))
    return found


def save(
    folder: Path, steps: Sequence[int], *, world_size: int = 1, config: str = "", **options: object
) -> list[SaveReport]:
    """Saves steps on this many ranks; returns the reports of rank 0."""
    return run_ranks(save_steps, world_size, folder, steps, options, config)[0]


def load_all(folders: Sequence[Path], *, world_size: int = 1, **options: object) -> list[Loaded]:
    """Resumes from each folder on this many ranks, which must agree; returns the answers of rank 0."""
    answers = run_ranks(load_each, world_size, folders, options)
    for of_ranks in zip(*answers, strict=True):
        assert len({(loaded.progress and loaded.progress.step, loaded.step, loaded.error) for loaded in of_ranks}) == 1
    return answers[0]


def load(folder: Path, *, world_size: int = 1, **options: object) -> Loaded:
    """Resumes from one folder."""
    return load_all([folder], world_size=world_size, **options)[0]
