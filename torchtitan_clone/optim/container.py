"""The optimizers of a model, with their state by parameter name, so that it loads under any parallelism."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import find_unknown_optimizers
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.interfaces import MatrixLayout
from torchtitan_clone.optim.groups import build_torch_optimizers, resolve_groups, scale_rates
from torchtitan_clone.optim.optimizers import OPTIMIZERS, scale_gradients
from torchtitan_clone.optim.schedule import Factors, scale_settings


class OptimizerContainer:
    """One torch optimizer for each name of OPTIMIZERS among the groups; none on a rank without parameters."""

    def __init__(
        self, optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter], layout: MatrixLayout,
        seed: int, lr_factor: Callable[[str], float] | None = None,
    ) -> None:  # fmt: skip
        groups = resolve_groups(optimizer, parameters=named_parameters)
        groups = groups if lr_factor is None else scale_rates(groups, lr_factor)
        self.torch_optimizers = build_torch_optimizers(groups, layout=layout, seed=seed)
        self._parameters = named_parameters
        self._settings = {name: group.settings for group in groups for name in group.parameters}
        self._patterns = {parameter: group.pattern for group in groups for parameter in group.parameters.values()}
        self._peak_lr = optimizer.lr
        self._peak_lr_of_groups = {g.pattern: g.lr or optimizer.lr for g in optimizer.groups if g.lr or g.lr_points}
        self.lr = optimizer.lr
        """Learning rate of the next step, for parameters whose group sets none."""
        self.lr_of_groups = self._peak_lr_of_groups
        """The same by the pattern of groups that set one, equal on all ranks."""

    def set_factors(self, factors: Factors) -> None:
        """Sets learning rate, weight decay and momentum of every group to so many times what its settings say."""
        own = {pattern: factors.lr * factors.lr_of_groups.get(pattern, 1.0) for pattern in self._peak_lr_of_groups}
        self.lr = self._peak_lr * factors.lr
        self.lr_of_groups = {pattern: lr * own[pattern] for pattern, lr in self._peak_lr_of_groups.items()}
        for torch_optimizer in self.torch_optimizers.values():
            for group in torch_optimizer.param_groups:
                pattern = self._patterns[group["params"][0]]
                scale_settings(group, replace(factors, lr=own.get(pattern, factors.lr)))

    def step(self, *, factor: float = 1.0) -> None:
        """Updates the parameters by their gradients times `factor`."""
        for name, torch_optimizer in self.torch_optimizers.items():
            if OPTIMIZERS[name].scales_gradients:
                cast("Any", torch_optimizer).step(factor=factor)
            else:
                scale_gradients(torch_optimizer, factor)
                torch_optimizer.step()

    def zero_grad(self) -> None:
        for torch_optimizer in self.torch_optimizers.values():
            torch_optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state's own tensors, not copies, by "parameter name/state name"; initializes absent state."""
        return {f"{name}/{key}": value for name in self._parameters for key, value in self._state(name).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Installs these tensors themselves, not copies, as the state; named as in state_dict()."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            parameter_name, _, key = name.rpartition("/")
            by_parameter.setdefault(parameter_name, {})[key] = tensor
        for name, parameter in self._parameters.items():
            self.torch_optimizers[self._settings[name].name].state[parameter] = by_parameter.get(name, {})

    def _state(self, name: str) -> dict[str, Tensor]:
        parameter = self._parameters[name]
        settings = self._settings[name]
        state = self.torch_optimizers[settings.name].state[parameter]
        if not state:
            state.update(OPTIMIZERS[settings.name].init_state(parameter.detach(), settings))
        return state


def build_optimizer(
    optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter], layout: MatrixLayout | None = None,
    seed: int = 0, lr_factor: Callable[[str], float] | None = None,
) -> OptimizerContainer:  # fmt: skip
    """Builds the optimizers for a rank's parameters that require gradients.

    Args:
        optimizer: Options of the run. Raises ConfigError for an unknown name.
        named_parameters: All parameters of the rank, by name.
        layout: How ranks share matrices, and what blocks these have. None: one rank, without blocks.
        seed: Of the draws that round the state.
        lr_factor: Returns what multiplies the learning rate of the parameter of a name, see scale_rates().
    """
    if unknown := [*find_unknown_optimizers(optimizer, known=OPTIMIZERS)]:
        raise ConfigError(unknown)
    trainable = {name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad}
    return OptimizerContainer(
        optimizer, named_parameters=trainable, layout=layout or MatrixLayout(), seed=seed, lr_factor=lr_factor
    )
