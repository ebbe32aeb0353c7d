"""Parameter groups: the optimizer and the settings of each parameter, by its name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from torchtitan_clone.config.names import describe_group, find_unknown_optimizers
from torchtitan_clone.config.overlay import did_you_mean
from torchtitan_clone.config.schema import Optimizer, OptimizerGroup
from torchtitan_clone.optim.optimizers import OPTIMIZERS

Assigned = tuple[OptimizerGroup, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ResolvedGroup:
    """Parameters that share an optimizer and all of its settings."""

    settings: Optimizer
    """The table updated with the group's settings; weight_decay is 0 for parameters that are not decayed."""
    parameters: Mapping[str, Tensor]


def resolve_groups(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> list[ResolvedGroup]:
    """Returns the non-empty groups, each split into decayed parameters and others; those without a pattern are last."""
    found: list[ResolvedGroup] = []
    for group, matched in _assign(optimizer, parameters=parameters):
        own = {key: value for key, value in vars(group).items() if key != "pattern" and value is not None}
        settings = replace(optimizer, groups=[], **own)
        decay_all = group.weight_decay is not None or optimizer.decay_all_parameters
        decayed = {name: parameter for name, parameter in matched.items() if decay_all or _is_matrix(name, parameter)}
        others = {name: parameter for name, parameter in matched.items() if name not in decayed}
        found.append(ResolvedGroup(settings=settings, parameters=decayed))
        found.append(ResolvedGroup(settings=replace(settings, weight_decay=0.0), parameters=others))
    return [group for group in found if group.parameters]


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is one or more matrices; the biases of experts are stacked too."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def find_optimizer_errors(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> list[str]:
    """Returns one message for each broken rule, given the parameters of all ranks, which may be on the meta device."""
    found = [
        *find_unknown_optimizers(optimizer, known=OPTIMIZERS),
        *_unmatched_patterns(optimizer, parameters=parameters),
    ]
    return found or [*_vectors_of_matrix_optimizers(optimizer, parameters=parameters)]


def _assign(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> list[Assigned]:
    """Returns every group, and last one for the rest, with the parameters whose first matching pattern it has."""
    assigned: list[Assigned] = [(group, {}) for group in [*optimizer.groups, OptimizerGroup(pattern="*")]]
    for name, parameter in parameters.items():
        matched = next(matched for group, matched in assigned if fnmatchcase(name, group.pattern))
        matched[name] = parameter
    return assigned


def _unmatched_patterns(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    for group, matched in _assign(optimizer, parameters=parameters)[:-1]:
        if matched:
            continue
        if any(fnmatchcase(name, group.pattern) for name in parameters):
            rule = "every parameter that it matches belongs to an earlier group, and the first match wins"
            yield f"{describe_group(group)}: {rule}; list it before that group, or remove it"
        else:
            known = dict.fromkeys(map(_without_index, parameters))
            yield f"{describe_group(group)}: matches no parameter of the model{did_you_mean(group.pattern, known)}"


def _vectors_of_matrix_optimizers(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    for group in resolve_groups(optimizer, parameters=parameters):
        vectors = dict.fromkeys(_without_index(name) for name, p in group.parameters.items() if p.ndim < 2)
        if vectors and OPTIMIZERS[group.settings.name].matrices_only:
            rule = f"updates matrices only, and is assigned {', '.join(vectors)}"
            yield f'optimizer "{group.settings.name}" {rule}; name another optimizer for them in optimizer.groups'


def _without_index(name: str) -> str:
    """Returns the pattern of a parameter in every layer: "layers.3.norm.weight" gives "layers.*.norm.weight"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
