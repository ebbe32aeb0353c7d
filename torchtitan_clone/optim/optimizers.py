"""The optimizers that a configuration can name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.config import overlay
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.optim.adam import Adam, adam_arguments, adam_state
from torchtitan_clone.optim.muon import Muon, MuonArgs, muon_state

ParamGroup = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class NoArgs:
    """Options of an optimizer that has none beyond those of `[optimizer]`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """How one optimizer is built."""

    build: Callable[..., torch.optim.Optimizer]
    """Builds the optimizer from param groups, each with all arguments; `params` are pairs of name and parameter."""
    arguments: Callable[[Optimizer], ParamGroup]
    """Returns the arguments of one param group by torch's names; they include "lr", which the schedule scales."""
    init_state: Callable[[Tensor, Optimizer], dict[str, Tensor]]
    """Returns the state of a parameter before its first step, by torch's names, which checkpoints contain."""
    args: type = NoArgs
    """Dataclass of the options in `[optimizer.args]`, whose instance with the defaults it builds without arguments."""
    matrices_only: bool = False
    """Whether it supports only parameters of at least two dimensions."""
    others: str | None = None
    """Optimizer of the parameters that this one is not for: vectors, the embedding and the output projection."""
    needs_layout: bool = False
    """Whether `build` takes the keyword `layout`, a MatrixLayout."""

    def resolve_args(self, settings: Optimizer) -> Any:
        """Returns the options of `args` as an instance of the kind's dataclass; ConfigError names those it lacks."""
        return overlay(self.args(), settings.args, where="optimizer.args")


@torch.no_grad()
def scale_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scales gradients in place, after it has converted them to the data type of their parameters."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)
        if factor != 1.0:
            local_shard(parameter.grad).mul_(factor)


def _muon_arguments(settings: Optimizer) -> ParamGroup:
    args = OPTIMIZERS["Muon"].resolve_args(settings)
    return {"lr": settings.lr, "weight_decay": settings.weight_decay, "beta2": settings.beta2, "args": args}


def _muon_state(parameter: Tensor, settings: Optimizer) -> dict[str, Tensor]:
    return muon_state(parameter, OPTIMIZERS["Muon"].resolve_args(settings))


OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": OptimizerKind(
        build=partial(Adam, decoupled_weight_decay=True), arguments=adam_arguments, init_state=adam_state
    ),
    "Adam": OptimizerKind(build=Adam, arguments=adam_arguments, init_state=adam_state),
    "Muon": OptimizerKind(
        build=Muon,
        arguments=_muon_arguments,
        init_state=_muon_state,
        args=MuonArgs,
        matrices_only=True,
        others="AdamW",
        needs_layout=True,
    ),
}
