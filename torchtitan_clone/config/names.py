"""Options that name an entry of a dict, such as a model or an optimizer; the caller gives the names of the dict."""

from collections.abc import Collection, Iterator

from torchtitan_clone.config.overlay import no_such
from torchtitan_clone.config.schema import LRScheduler, Model, Optimizer, OptimizerGroup, Parallelism


def find_unknown_model(model: Model, *, known: Collection[str]) -> Iterator[str]:
    """Yields a message if there is no such family."""
    if model.name not in known:
        yield no_such("model.name", model.name, what="model", known=known)


def find_unknown_flavor(model: Model, *, family: str, known: Collection[str]) -> Iterator[str]:
    """Yields a message if a family has no such flavor."""
    if model.flavor not in known:
        yield no_such("model.flavor", model.flavor, what=f"flavor of {family}", known=known)


def find_unknown_optimizers(optimizer: Optimizer, *, known: Collection[str]) -> Iterator[str]:
    """Yields one message for each name that is no optimizer."""
    names = {"optimizer.name": optimizer.name}
    names |= {f"{describe_group(group)}: name": group.name for group in optimizer.groups if group.name is not None}
    for option, name in names.items():
        if name not in known:
            yield no_such(option, name, what="optimizer", known=known)


def describe_group(group: OptimizerGroup) -> str:
    """Returns an entry of optimizer.groups as messages name it."""
    return f'optimizer.groups, pattern "{group.pattern}"'


def find_unknown_decay(lr_scheduler: LRScheduler, *, known: Collection[str]) -> Iterator[str]:
    """Yields a message if there is no such decay."""
    if lr_scheduler.decay_type not in known:
        yield no_such("lr_scheduler.decay_type", lr_scheduler.decay_type, what="shape", known=known)


def find_unknown_schedule(parallelism: Parallelism, *, known: Collection[str]) -> Iterator[str]:
    """Yields a message if there is no such pipeline schedule, unless a file takes its place."""
    name = parallelism.pipeline_parallel_schedule
    if name not in known and not parallelism.pipeline_parallel_schedule_csv:
        yield no_such("parallelism.pipeline_parallel_schedule", name, what="schedule", known=known)
