"""Checkpoints of other trainers: how their tensors are compared with those of a run here, and read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.format import MODEL, OPTIMIZER
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.documents import shorten
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.optim.groups import resolve_groups
from torchtitan_clone.optim.optimizers import OPTIMIZERS

Shapes = Mapping[str, Sequence[int]]
"""Shapes of tensors by name."""


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """Tensors by their names in checkpoints here, on the meta device, and how one is read."""

    meta: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    progress: Progress
    warnings: tuple[str, ...]


def resolve_args(spec: ModelSpec, config: Config) -> Any:
    """Returns the arguments of the run's model; ConfigError if they are not valid."""
    args = spec.resolve_args(config.model)
    if problems := args.violations():
        raise ConfigError(problems)
    return args


def state_on_meta(spec: ModelSpec, args: Any, *, config: Config, model_only: bool) -> dict[str, Tensor]:
    """Returns the tensors that a run would save, without values."""
    with torch.device("meta"):
        parameters = dict(spec.build(args).to(getattr(torch, config.training.dtype)).named_parameters())
    state = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
    for group in resolve_groups(config.optimizer, parameters=parameters) if not model_only else ():
        for name, parameter in group.parameters.items():
            states = OPTIMIZERS[group.settings.name].init_state(parameter.detach(), group.settings)
            state |= {f"{OPTIMIZER}{name}/{key}": tensor.to("meta") for key, tensor in states.items()}
    return state


def check_match(wanted: Shapes, found: Shapes, *, source: object, model_only: bool) -> None:
    """Raises ConfigError with the names, those of the other trainer, in which a run and a checkpoint differ."""
    problems = {
        "missing in the checkpoint": [name for name in wanted if name not in found],
        "only in the checkpoint": [name for name in found if name not in wanted],
        "different shape": [
            f"{name} {[*found[name]]} -> {[*shape]}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ],
    }
    if texts := [f"{kind}: {shorten(', '.join(names))}" for kind, names in problems.items() if names]:
        tables = "[model]" if model_only else "[model] and [optimizer]"
        what = f"{source} does not match {tables} of this configuration; {'; '.join(texts)}"
        raise ConfigError(f"{what}. Set the options of the run that saved it")


def unlike_settings(saved: Mapping[str, Sequence[float]], *, optimizer: Optimizer) -> Iterator[str]:
    """Yields a warning for each setting that the optimizer of the checkpoint had otherwise, by torch's names."""
    ours = {
        "lr": {"lr": optimizer.lr},
        "betas": {"beta1": optimizer.beta1, "beta2": optimizer.beta2},
        "eps": {"eps": optimizer.eps},
        "weight_decay": {"weight_decay": optimizer.weight_decay},
    }
    for setting, options in ours.items():
        for (option, value), theirs in zip(options.items(), saved.get(setting, ()), strict=False):
            if theirs != value:
                yield f"optimizer.{option} = {value:g}, and the run that saved the checkpoint had {theirs:g}"
