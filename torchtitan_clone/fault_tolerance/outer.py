"""The outer optimizer of semi-synchronous training, its state, and the fragments of the model that it steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.ops.dtensor_shards import local_shard


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """Gradient descent with Nesterov momentum on the global weights."""

    lr: float
    momentum: float


OUTER_OPTIMIZERS = {
    "local_sgd": OuterOptimizer(lr=1.0, momentum=0.0),
    "diloco": OuterOptimizer(lr=0.7, momentum=0.9),
}


def outer_state(fault_tolerance: FaultTolerance, *, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Global weights and momentum, to be saved with the training state; nothing where there is no outer optimizer.

    The global weights are not known yet: a checkpoint fills them, or else `init_outer_weights` does.
    """
    if not fault_tolerance.enable or fault_tolerance.semi_sync_method is None:
        return {}
    state = {f"outer/global/{name}": torch.full_like(p.detach(), torch.nan) for name, p in parameters.items()}
    if OUTER_OPTIMIZERS[fault_tolerance.semi_sync_method].momentum:
        state |= {f"outer/momentum/{name}": torch.zeros_like(p.detach()) for name, p in parameters.items()}
    return state


def init_outer_weights(state: Mapping[str, Tensor], *, parameters: Mapping[str, Tensor]) -> None:
    """Global weights that were not loaded are those that the run starts with."""
    for name, parameter in parameters.items():
        target = state.get(f"outer/global/{name}")
        if target is not None and bool(local_shard(target).isnan().any()):
            local_shard(target).copy_(local_shard(parameter.detach()))


def split_into_fragments(names: list[str], fault_tolerance: FaultTolerance) -> list[list[str]]:
    """The parameters of each fragment: as listed, or neighbours in about equal numbers of modules."""
    listed = fault_tolerance.module_fqns_per_model_fragment
    if not listed:
        modules = list(dict.fromkeys(module_of(name) for name in names))
        count = fault_tolerance.num_fragments
        bounds = [index * len(modules) // count for index in range(count + 1)]
        listed = [modules[first:last] for first, last in pairwise(bounds)]
    fragments = [[name for name in names if module_of(name) in modules] for modules in listed]
    wrong = [name for name in names if sum(name in fragment for fragment in fragments) != 1]
    if wrong or not all(fragments):
        raise ConfigError(
            "fault_tolerance.module_fqns_per_model_fragment: every module of the model must stand in one fragment, and "
            f"none be empty; look at {', '.join(sorted({module_of(name) for name in wrong})) or 'the empty ones'}"
        )
    return fragments


def module_of(name: str) -> str:
    """tok_embeddings, layers.0, ..., norm, output."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
