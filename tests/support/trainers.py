"""Trainers inside a rank, for tests and benchmarks that look at more than the entry point shows."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.replicas.protocol import ReplicaGroup
from torchtitan_clone.run import preflight
from torchtitan_clone.run.stopping import StopRequest
from torchtitan_clone.trainer import Trainer


@contextmanager
def open_trainer(
    argv: list[str],
    *,
    wrap_replica_group: Callable[[ReplicaGroup], ReplicaGroup] | None = None,
    trainer: type[Trainer] = Trainer,
) -> Iterator[Trainer]:
    """Builds this rank's trainer inside its process group; nothing is trained yet.

    The trainer calls the methods of the wrapped replica group in every step, which shows what a step does.
    """
    yield from open_trainers([argv], wrap_replica_group=wrap_replica_group, trainer=trainer)


def open_trainers(
    runs: list[list[str]],
    *,
    wrap_replica_group: Callable[[ReplicaGroup], ReplicaGroup] | None = None,
    trainer: type[Trainer] = Trainer,
) -> Iterator[Trainer]:
    """Yields this rank's trainer of each run, one after another, inside one process group."""
    launch = Launch.from_environment()
    device = pick_device(launch)
    with process_group(load_config(runs[0]).comm, launch=launch, device=device):
        for argv in runs:
            plan = preflight.resolve(load_config(argv), world_size=launch.world_size, device_type=device.type)
            run = preflight.prepare(plan, launch=launch)
            yield trainer(run, launch=launch, device=device, stop=StopRequest(), wrap_replica_group=wrap_replica_group)


def train_all(runs: list[list[str]]) -> None:
    """Trains runs to the end, one after another, as one rank. A run that is started again resumes.

    Starting ranks and filling torch's caches takes longer than a short run.
    """
    for trainer in open_trainers(runs):
        assert trainer.train()


def full_copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns copies of global tensors by name; a collective where they are DTensors."""
    detached = {name: tensor.detach() for name, tensor in tensors}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in detached.items()}
