"""The optimizer, with its state known by parameter name.

Names, not positions, are what a checkpoint holds: so the state survives another split of the model over ranks.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Optimizer


def _adam_arguments(optimizer: Optimizer) -> dict:
    return {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "fused": optimizer.implementation == "fused",
        "foreach": optimizer.implementation == "foreach",
    }


OPTIMIZERS: dict[str, Callable[[list[dict], Optimizer], torch.optim.Optimizer]] = {
    "AdamW": lambda groups, optimizer: torch.optim.AdamW(groups, **_adam_arguments(optimizer)),
    "Adam": lambda groups, optimizer: torch.optim.Adam(groups, **_adam_arguments(optimizer)),
}


class OptimizerContainer:
    """One torch optimizer over named parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, names: Mapping[Tensor, str], lr: float):
        self._optimizer = optimizer
        self._names = names
        self._lr = lr

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    def set_lr_factor(self, factor: float) -> None:
        """Sets the learning rate to this share of optimizer.lr."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * factor

    def step(self) -> None:
        """Changes the weights by their gradients."""
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The state's own tensors, not copies, by "parameter name/state name"; made first where a step has not yet."""
        if not self._optimizer.state:
            self._materialize()
        return {
            f"{name}/{key}": value
            for parameter, name in self._names.items()
            for key, value in self._optimizer.state[parameter].items()
        }

    def take_state(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with these tensors as its state, named as in state_dict()."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            parameter_name, _, key = name.rpartition("/")
            by_name.setdefault(parameter_name, {})[key] = tensor
        for parameter, name in self._names.items():
            self._optimizer.state[parameter] = by_name[name]

    def _materialize(self) -> None:
        """Lets torch make the state: one step of zero gradients at a learning rate of zero, then zero it."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()


def build_optimizer(optimizer: Optimizer, *, named_parameters: Mapping[str, nn.Parameter]) -> OptimizerContainer:
    """The optimizer that `optimizer.name` names, over these parameters; ConfigError for an unknown one.

    Weight decay applies to matrices only, unless `decay_all_parameters`.
    """
    if optimizer.name not in OPTIMIZERS:
        raise ConfigError([f'optimizer.name = "{optimizer.name}": no such optimizer; known: {", ".join(OPTIMIZERS)}'])
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in named_parameters.items() if parameter.requires_grad
    }
    matrices = [p for p in names if p.ndim >= 2 or optimizer.decay_all_parameters]
    vectors = [p for p in names if p.ndim < 2 and not optimizer.decay_all_parameters]
    # A group may be empty: all that a rank of a pipeline has may be frozen.
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return OptimizerContainer(OPTIMIZERS[optimizer.name](groups, optimizer), names=names, lr=optimizer.lr)
