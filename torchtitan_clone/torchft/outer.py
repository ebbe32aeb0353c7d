"""The outer optimizer of semi-synchronous training, its state, and the fragments of the model that it averages."""

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.ops.dtensor_shards import local_shard

OUTER_OPTIMIZERS = {"local_sgd": (1.0, 0.0), "diloco": (0.7, 0.9)}
"""Learning rate and Nesterov momentum of SGD on the global weights, by fault_tolerance.semi_sync_method."""


def outer_state(fault_tolerance: FaultTolerance, *, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the global weights, NaN until they are filled, and momentum."""
    _, momentum = OUTER_OPTIMIZERS[fault_tolerance.semi_sync_method or ""]
    state = {f"outer/global/{name}": torch.full_like(p.detach(), torch.nan) for name, p in parameters.items()}
    if momentum:
        state |= {f"outer/momentum/{name}": torch.zeros_like(p.detach()) for name, p in parameters.items()}
    return state


def init_outer_weights(state: Mapping[str, Tensor], *, parameters: Mapping[str, Tensor]) -> None:
    """Sets the global weights that were not loaded from a checkpoint to the weights of the model."""
    for name, parameter in parameters.items():
        target = state.get(f"outer/global/{name}")
        if target is not None and bool(local_shard(target).isnan().any()):
            local_shard(target).copy_(local_shard(parameter.detach()))


class OuterWeights:
    """Local shards of the global weights and of their momentum, as in `state`, with the step of the outer optimizer."""

    def __init__(self, state: Mapping[str, Tensor], *, parameters: Mapping[str, Tensor], options: FaultTolerance):
        self._state = {name: local_shard(tensor) for name, tensor in state.items()}
        self._parameters = {name: local_shard(parameter) for name, parameter in parameters.items()}
        self._lr, self._momentum = OUTER_OPTIMIZERS[options.semi_sync_method or ""]
        self._local_fraction = options.fragment_update_alpha

    def gradient(self, name: str) -> Tensor:
        """Returns the outer gradient of this group: how far its weight has moved from the global one."""
        return self._state[f"outer/global/{name}"] - self._parameters[name].detach()

    @torch.no_grad()
    def step(self, name: str, *, gradient: Tensor) -> None:
        """Moves a global weight by the averaged outer gradient, and the group's own weight to the global one."""
        target = self._state[f"outer/global/{name}"]
        weight = self._parameters[name]
        if self._momentum:
            momentum = self._state[f"outer/momentum/{name}"]
            momentum.mul_(self._momentum).add_(gradient)
            gradient = gradient + self._momentum * momentum
        target.sub_(gradient, alpha=self._lr)
        weight.copy_(target.lerp(weight, self._local_fraction))


def split_into_fragments(names: Sequence[str], options: FaultTolerance, *, own: Container[str]) -> list[list[str]]:
    """Returns the names in `own` of each fragment: as configured, or consecutive modules in about equal numbers.

    `names` are those of all parameters of the model. ConfigError if the configured fragments do not contain every
    module exactly once, or if there are more fragments than modules.
    """
    listed = options.module_fqns_per_model_fragment
    if not listed:
        modules = list(dict.fromkeys(map(_module_of, names)))
        count = options.num_fragments
        if count > len(modules):
            rule = f"the model has only {len(modules)} modules to divide"
            raise ConfigError(f"fault_tolerance.num_fragments = {count}: {rule}; set it to at most {len(modules)}")
        bounds = [index * len(modules) // count for index in range(count + 1)]
        listed = [modules[first:last] for first, last in pairwise(bounds)]
    fragments = [[name for name in names if _module_of(name) in modules] for modules in listed]
    wrong = [name for name in names if sum(name in fragment for fragment in fragments) != 1]
    if wrong or not all(fragments):
        found = ", ".join(sorted(set(map(_module_of, wrong)))) or "the empty ones"
        raise ConfigError(
            "fault_tolerance.module_fqns_per_model_fragment: every module of the model must be in exactly one "
            f"fragment, and no fragment may be empty; check {found}"
        )
    return [[name for name in fragment if name in own] for fragment in fragments]


def _module_of(name: str) -> str:
    """Returns the module of a parameter: tok_embeddings, layers.0, ..., norm or output."""
    path = name.split(".")
    return ".".join(path[:2]) if path[0] == "layers" else path[0]
