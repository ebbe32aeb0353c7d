"""The optimizers of a model, with their state known by parameter name.

Names, not positions, are what a checkpoint holds, so that the state can be loaded with another split of the model.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Optimizer
from torchtitan_clone.optim.groups import ResolvedGroup, find_unknown_optimizers, resolve_groups
from torchtitan_clone.optim.optimizers import OPTIMIZERS, ParamGroup


class OptimizerContainer:
    """One torch optimizer for each name of OPTIMIZERS that a parameter group has; none on a rank without parameters."""

    def __init__(self, optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter]):
        groups = resolve_groups(optimizer, parameters=named_parameters)
        self.torch_optimizers = _build_torch_optimizers(groups)
        self._parameters = named_parameters
        self._settings = {name: group.settings for group in groups for name in group.parameters}
        self._lr = optimizer.lr
        self._lr_factor = 1.0

    @property
    def lr(self) -> float:
        """Learning rate of the next step, for parameters whose group sets none."""
        return self._lr * self._lr_factor

    def set_lr_factor(self, factor: float) -> None:
        """Sets the learning rate of every group to `factor` times the peak learning rate of that group."""
        self._lr_factor = factor
        for torch_optimizer in self.torch_optimizers.values():
            for group in torch_optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def step(self) -> None:
        """Updates the parameters from their gradients."""
        for torch_optimizer in self.torch_optimizers.values():
            torch_optimizer.step()

    def zero_grad(self) -> None:
        """Sets the gradients to None."""
        for torch_optimizer in self.torch_optimizers.values():
            torch_optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state's own tensors, not copies, by "parameter name/state name".

        A parameter that has taken no step yet gets its initial state.
        """
        return {f"{name}/{key}": value for name in self._parameters for key, value in self._state(name).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Installs these tensors themselves, not copies, as the state; named as in state_dict()."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            parameter_name, _, key = name.rpartition("/")
            by_parameter.setdefault(parameter_name, {})[key] = tensor
        for name, parameter in self._parameters.items():
            self._torch_optimizer(name).state[parameter] = by_parameter[name]

    def _state(self, name: str) -> dict[str, Tensor]:
        """State of one parameter, initialized where no step has done so."""
        parameter, settings = self._parameters[name], self._settings[name]
        state = self._torch_optimizer(name).state[parameter]
        if not state:
            state.update(OPTIMIZERS[settings.name].init_state(parameter.detach(), settings))
        return state

    def _torch_optimizer(self, name: str) -> torch.optim.Optimizer:
        return self.torch_optimizers[self._settings[name].name]


def build_optimizer(optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter]) -> OptimizerContainer:
    """Builds the optimizers of those of a rank's parameters that require gradients; ConfigError for an unknown name.

    Weight decay applies to matrices only, unless `decay_all_parameters` or the group's own weight_decay says otherwise.
    Patterns are checked before, by find_optimizer_errors(), against the parameters of all ranks.
    """
    if unknown := find_unknown_optimizers(optimizer):
        raise ConfigError(unknown)
    trainable = {name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad}
    return OptimizerContainer(optimizer, named_parameters=trainable)


def _build_torch_optimizers(groups: Iterable[ResolvedGroup]) -> dict[str, torch.optim.Optimizer]:
    """Builds one torch optimizer per name, whose param groups are the groups of that name in their order."""
    by_name: dict[str, list[ParamGroup]] = {}
    for group in groups:
        arguments = OPTIMIZERS[group.settings.name].arguments(group.settings)
        # "initial_lr" is what torch's own schedulers call the learning rate that they scale.
        param_group = {"params": [*group.parameters.values()], **arguments, "initial_lr": arguments["lr"]}
        by_name.setdefault(group.settings.name, []).append(param_group)
    return {name: OPTIMIZERS[name].build(param_groups) for name, param_groups in by_name.items()}
