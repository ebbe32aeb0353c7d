"""The optimizers of a model, with their state by parameter name, so that it loads under any parallelism."""

from collections.abc import Mapping

from torch import Tensor, nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.checks import find_unknown_optimizers
from torchtitan_clone.config.schema_training import Optimizer
from torchtitan_clone.optim.adam import Adam
from torchtitan_clone.optim.groups import build_torch_optimizers, resolve_groups
from torchtitan_clone.optim.matrices import MatrixLayout
from torchtitan_clone.optim.muon import Muon
from torchtitan_clone.optim.optimizers import OPTIMIZERS, scale_gradients


class OptimizerContainer:
    """One torch optimizer for each name of OPTIMIZERS among the groups; none on a rank without parameters."""

    def __init__(
        self, optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter], layout: MatrixLayout
    ) -> None:
        groups = resolve_groups(optimizer, parameters=named_parameters)
        self.torch_optimizers = build_torch_optimizers(groups, layout=layout)
        self._parameters = named_parameters
        self._settings = {name: group.settings for group in groups for name in group.parameters}
        self._peak_lr = optimizer.lr
        self.lr = optimizer.lr
        """Learning rate of the next step, for parameters whose group sets none."""

    def set_lr_factor(self, factor: float) -> None:
        """Sets the learning rate of every group to `factor` times the peak learning rate of that group."""
        self.lr = self._peak_lr * factor
        for torch_optimizer in self.torch_optimizers.values():
            for group in torch_optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def step(self, *, factor: float = 1.0) -> None:
        """Updates the parameters by their gradients times `factor`."""
        for torch_optimizer in self.torch_optimizers.values():
            if isinstance(torch_optimizer, Adam | Muon):
                torch_optimizer.step(factor=factor)
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
    optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter], layout: MatrixLayout | None = None
) -> OptimizerContainer:
    """Builds the optimizers for a rank's parameters that require gradients; ConfigError for an unknown name.

    `layout` says how ranks share matrices and what blocks they have; None: on one rank, without blocks.
    """
    if unknown := [*find_unknown_optimizers(optimizer, known=OPTIMIZERS)]:
        raise ConfigError(unknown)
    trainable = {name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad}
    return OptimizerContainer(optimizer, named_parameters=trainable, layout=layout or MatrixLayout())
