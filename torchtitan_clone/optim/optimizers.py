"""The optimizers that a configuration can name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.config import overlay
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.interfaces import MatrixLayout
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.optim.adam import Adam, AdamArgs, adam_arguments, adam_state

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
    args: Callable[[], Any] = NoArgs
    """Returns the options in `[optimizer.args]` with their defaults: a dataclass, or what imports and calls one."""
    scales_gradients: bool = False
    """Whether `step` takes the keyword `factor` and scales gradients by it; otherwise they are scaled before it."""
    matrices_only: bool = False
    """Whether it supports only parameters of at least two dimensions."""
    others: str | None = None
    """Optimizer of the parameters that this one is not for: vectors, the embedding and the output projection."""
    find_problem: Callable[[Optimizer], str | None] = lambda _: None
    """Returns what is wrong with the settings of a group that is right by itself; None: nothing."""
    needs: tuple[str, ...] = ()
    """Keywords that `build` takes too: layout, a MatrixLayout, and seed, that of the run."""

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


def _adam_arguments(settings: Optimizer) -> ParamGroup:
    return adam_arguments(settings, OPTIMIZERS[settings.name].resolve_args(settings))


def _adam_state(parameter: Tensor, settings: Optimizer) -> dict[str, Tensor]:
    choice = OPTIMIZERS[settings.name].resolve_args(settings).state_dtype
    return adam_state(parameter, fused=settings.implementation == "fused", choice=choice)


# Muon is imported only where a configuration names it.


def _muon_args() -> Any:
    from torchtitan_clone.optim.muon import MuonArgs

    return MuonArgs()


def _muon_arguments(settings: Optimizer) -> ParamGroup:
    args = OPTIMIZERS["Muon"].resolve_args(settings)
    scheduled = {"lr": settings.lr, "weight_decay": settings.weight_decay, "momentum": args.momentum}
    return {**scheduled, "beta2": settings.beta2, "args": args}


def _muon_state(parameter: Tensor, settings: Optimizer) -> dict[str, Tensor]:
    from torchtitan_clone.optim.muon import muon_state

    return muon_state(parameter, OPTIMIZERS["Muon"].resolve_args(settings))


def _build_muon(param_groups: list[ParamGroup], *, layout: MatrixLayout, seed: int) -> torch.optim.Optimizer:
    from torchtitan_clone.optim.muon import Muon

    return Muon(param_groups, layout=layout, seed=seed)


_ADAM = OptimizerKind(
    build=Adam,
    arguments=_adam_arguments,
    init_state=_adam_state,
    args=AdamArgs,
    scales_gradients=True,
    needs=("seed",),
)
OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": replace(_ADAM, build=partial(Adam, decoupled_weight_decay=True)),
    "Adam": _ADAM,
    "Muon": OptimizerKind(
        build=_build_muon,
        arguments=_muon_arguments,
        init_state=_muon_state,
        args=_muon_args,
        scales_gradients=True,
        matrices_only=True,
        others="AdamW",
        needs=("layout", "seed"),
    ),
}
