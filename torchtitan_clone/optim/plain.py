"""Plain optimizers: classes of your own with the interface of torch.optim.Optimizer, for use from a configuration.

They see parameters and state as DTensors, so a step means the same on any mesh. Each state of a parameter that they
create is saved under its name; numbers among it become fp64 tensors, with which the same formulas work.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.imports import describe_failure
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.optim.optimizers import OPTIMIZERS, NoArgs, OptimizerKind, ParamGroup

InitState = Callable[[Tensor], dict[str, Tensor]]


def register_optimizer(
    name: str,
    build: Callable[..., torch.optim.Optimizer],
    *,
    args: type = NoArgs,
    init_state: InitState | None = None,
    matrices_only: bool = False,
    others: str | None = None,
) -> None:
    """Lets `optimizer.name` and `optimizer.groups` name an optimizer. ConfigError if `args` is no dataclass.

    Args:
        name: its name in configurations.
        build: the class, called with parameters, `lr`, `weight_decay` if it takes that, and the options of `args`.
        args: frozen dataclass of the options in `[optimizer.args]`, all with a default.
        init_state: returns the state of a parameter before its first step; None: zeros.
        matrices_only, others: as in OptimizerKind.
    """
    if not is_dataclass(args):
        raise ConfigError(f'optimizer "{name}": args = {args!r} must be a dataclass of options')
    plain = _Plain(name=name, create=build, args=args, init_state=init_state)
    OPTIMIZERS[name] = OptimizerKind(
        build=plain.build,
        arguments=plain.arguments,
        init_state=lambda parameter, settings: plain.state(parameter, plain.arguments(settings)),
        args=args,
        matrices_only=matrices_only,
        others=others,
        find_problem=plain.find_problem,
    )


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """A registered class."""

    name: str
    create: Callable[..., torch.optim.Optimizer]
    args: type
    init_state: InitState | None

    def arguments(self, settings: Optimizer) -> ParamGroup:
        own = vars(OPTIMIZERS[self.name].resolve_args(settings))
        decay = {"weight_decay": settings.weight_decay} if self._decays else {}
        return {"lr": settings.lr} | decay | own

    @property
    def _decays(self) -> bool:
        parameters = inspect.signature(self.create).parameters.values()
        return any(each.name == "weight_decay" or each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters)

    def build(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns the optimizer of groups, each with what the class makes of the group's arguments."""
        groups: list[dict[str, Any]] = []
        for group in param_groups:
            parameters = [parameter for _, parameter in group["params"]]
            (own,) = self.create(parameters, **_own_arguments(group)).param_groups
            groups.append(own | {key: value for key, value in group.items() if key.startswith("initial_")})
        optimizer = self.create(groups, **_own_arguments(param_groups[0]))

        def fill_state(*_: object) -> None:
            for group, settings in zip(optimizer.param_groups, param_groups, strict=True):
                for parameter in group["params"]:
                    if parameter.grad is not None and not optimizer.state[parameter]:
                        optimizer.state[parameter].update(self.state(parameter.detach(), settings))

        optimizer.register_step_pre_hook(fill_state)
        return optimizer

    def state(self, parameter: Tensor, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the state before the first step; without `init_state` zeros of what a first step leaves."""
        if self.init_state is not None:
            return self.init_state(parameter)
        after = self._after_a_step(torch.zeros_like(parameter), arguments).state
        return {key: torch.zeros_like(_as_tensor(value)) for state in after.values() for key, value in state.items()}

    def _after_a_step(self, values: Tensor, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Returns an optimizer of its own of one parameter, after a step with a gradient of zeros."""
        twin = nn.Parameter(values)
        twin.grad = torch.zeros_like(values)
        optimizer = self.create([twin], **_own_arguments(arguments))
        optimizer.step()
        return optimizer

    def find_problem(self, settings: Optimizer) -> str | None:
        """Returns why the class cannot be used with these settings, by a step of a small parameter."""
        if settings.weight_decay and not self._decays:
            return "takes no weight_decay; set optimizer.weight_decay = 0"
        arguments = self.arguments(settings)
        try:
            (before,) = self.create([nn.Parameter(torch.ones(2, 2))], **arguments).param_groups
            optimizer = self._after_a_step(torch.ones(2, 2), arguments)
        except Exception as error:  # noqa: BLE001, whatever the user's code raises
            return f"fails with these options: {describe_failure(error)}"
        (group,) = optimizer.param_groups
        if "lr" not in group:
            return "keeps no lr in its param groups, so that no schedule can set it"
        if changed := [key for key in group if key != "params" and group[key] != before.get(key)]:
            return f"changes {changed[0]} of its param groups in a step, which checkpoints do not hold"
        return _find_state_problem(next(iter(optimizer.state.values()), {}), is_given=self.init_state is not None)


def _own_arguments(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the class is called with, without what schedules read."""
    return {key: value for key, value in group.items() if key != "params" and not key.startswith("initial_")}


def _find_state_problem(state: Mapping[str, object], *, is_given: bool) -> str | None:
    for key, value in state.items():
        if not isinstance(value, int | float | Tensor):
            return f"has {key} of type {type(value).__name__} in its state; checkpoints hold tensors and numbers"
        if isinstance(value, Tensor) and value.ndim and not is_given and bool(value.nan_to_num().any()):
            return f"begins with {key} that is not zeros; give init_state to register_optimizer"
    return None


def _as_tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(cast("float", value), dtype=torch.float64)
