"""The optimizers that a configuration can name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_clone.config.schema import Optimizer

ParamGroup = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """How one optimizer is built."""

    build: Callable[[list[ParamGroup]], torch.optim.Optimizer]
    """Builds the torch optimizer from param groups, each with all arguments."""
    arguments: Callable[[Optimizer], ParamGroup]
    """Returns the arguments of one param group by torch's names; they include "lr", which the schedule scales."""
    init_state: Callable[[Tensor, Optimizer], dict[str, Tensor]]
    """Returns the state of a parameter before its first step, by torch's names, which checkpoints contain."""
    matrices_only: bool = False
    """Whether it supports only parameters of at least two dimensions."""


def _adam_arguments(settings: Optimizer) -> ParamGroup:
    return {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "fused": settings.implementation == "fused",
        "foreach": settings.implementation == "foreach",
    }


def _adam_state(parameter: Tensor, settings: Optimizer) -> dict[str, Tensor]:
    # Only the fused kernel reads the step on the device; elsewhere it would cost a host sync per parameter.
    step_device = parameter.device if settings.implementation == "fused" else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=step_device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


OPTIMIZERS: dict[str, OptimizerKind] = {
    "AdamW": OptimizerKind(build=torch.optim.AdamW, arguments=_adam_arguments, init_state=_adam_state),
    "Adam": OptimizerKind(build=torch.optim.Adam, arguments=_adam_arguments, init_state=_adam_state),
}
