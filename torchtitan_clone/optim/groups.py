"""Parameter groups: the optimizer and the settings of each parameter, by its name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from torchtitan_clone.config import ConfigError, overlay
from torchtitan_clone.config.checks import describe_group, find_range_errors, find_unknown_optimizers
from torchtitan_clone.config.messages import did_you_mean
from torchtitan_clone.config.schema_training import Optimizer, OptimizerGroup
from torchtitan_clone.interfaces import MatrixLayout
from torchtitan_clone.optim.optimizers import OPTIMIZERS, ParamGroup
from torchtitan_clone.optim.schedule import SCHEDULED

Assigned = tuple[OptimizerGroup, dict[str, Tensor]]
NOT_OVERRIDDEN = ("pattern", "lr_points", "args")
"""Options of a group that are not those of the table for its parameters."""


@dataclass(frozen=True, kw_only=True)
class ResolvedGroup:
    """Parameters that share an optimizer and all of its settings."""

    settings: Optimizer
    """The table updated with the group's settings; weight_decay is 0 for parameters that are not decayed."""
    parameters: Mapping[str, Tensor]
    pattern: str
    """That of the entry of optimizer.groups, "*" without one."""


def resolve_groups(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> list[ResolvedGroup]:
    """Returns the non-empty groups, each split into decayed parameters and others; those without a pattern are last.

    A group that names no optimizer of its own leaves parameters that the table's is not for to another one.
    """
    resolved: list[ResolvedGroup] = []
    for group, matched in _assign(optimizer, parameters=parameters):
        own = {key: value for key, value in vars(group).items() if key not in NOT_OVERRIDDEN and value is not None}
        is_same_kind = own.get("name", optimizer.name) == optimizer.name
        settings = replace(optimizer, groups=[], **own, args=(optimizer.args if is_same_kind else {}) | group.args)
        other_kind = OPTIMIZERS[optimizer.name].others if group.name is None else None
        left = {name: p for name, p in matched.items() if other_kind and not _suits_matrix_optimizers(name, p)}
        rest = replace(settings, name=other_kind, args={}) if other_kind else settings
        taken = {name: parameter for name, parameter in matched.items() if name not in left}
        decay_all = group.weight_decay is not None or optimizer.decay_all_parameters
        for each, its_parameters in ((settings, taken), (rest, left)):
            decayed = {name: p for name, p in its_parameters.items() if decay_all or _is_matrix(name, p)}
            others = {name: p for name, p in its_parameters.items() if name not in decayed}
            undecayed = replace(each, weight_decay=0.0)
            resolved.append(ResolvedGroup(settings=each, parameters=decayed, pattern=group.pattern))
            resolved.append(ResolvedGroup(settings=undecayed, parameters=others, pattern=group.pattern))
    return [group for group in resolved if group.parameters]


def scale_rates(groups: Iterable[ResolvedGroup], lr_factor: Callable[[str], float]) -> list[ResolvedGroup]:
    """Returns the groups, split so that learning rates are times the factor of each parameter by its name.

    What a step decays stays as it is. Optimizers of matrices scale their updates by the shape themselves.
    """
    scaled: list[ResolvedGroup] = []
    for group in groups:
        settings = group.settings
        factors = {name: lr_factor(name) for name in group.parameters}
        for factor in dict.fromkeys(factors.values()):
            if not OPTIMIZERS[settings.name].matrices_only:
                settings = replace(
                    group.settings, lr=group.settings.lr * factor, weight_decay=group.settings.weight_decay / factor
                )
            own = {name: parameter for name, parameter in group.parameters.items() if factors[name] == factor}
            scaled.append(replace(group, settings=settings, parameters=own))
    return scaled


def build_torch_optimizers(
    groups: Iterable[ResolvedGroup], *, layout: MatrixLayout, seed: int
) -> dict[str, torch.optim.Optimizer]:
    """Returns one torch optimizer for each name among the groups."""
    by_name: dict[str, list[ParamGroup]] = {}
    for group in groups:
        arguments = OPTIMIZERS[group.settings.name].arguments(group.settings)
        # torch's own schedulers scale "initial_lr" too.
        initial = {f"initial_{name}": arguments[name] for name in SCHEDULED if name in arguments}
        param_group = {"params": [*group.parameters.items()], **arguments, **initial}
        by_name.setdefault(group.settings.name, []).append(param_group)
    given = {"layout": layout, "seed": seed}
    return {
        name: OPTIMIZERS[name].build(param_groups, **{key: given[key] for key in OPTIMIZERS[name].needs})
        for name, param_groups in by_name.items()
    }


def _suits_matrix_optimizers(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a map between hidden states.

    Rows of embeddings and outputs are those of single tokens, rows of convolutions those of single channels.
    """
    is_map = not name.startswith(("tok_embeddings.", "output.")) and not name.endswith("_conv.weight")
    return is_map and _is_matrix(name, parameter)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is one or more matrices; the biases of experts are stacked too."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def find_optimizer_errors(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> list[str]:
    """Returns one message for each broken rule, given the parameters of all ranks, which may be on the meta device."""
    errors = [
        *find_unknown_optimizers(optimizer, known=OPTIMIZERS),
        *_unmatched_patterns(optimizer, parameters=parameters),
    ]
    errors = errors or [*_wrong_args(optimizer)]
    errors = errors or [*_vectors_of_matrix_optimizers(optimizer, parameters=parameters)]
    return errors or [*dict.fromkeys(_unusable(optimizer, parameters=parameters))]


def _wrong_args(optimizer: Optimizer) -> Iterator[str]:
    """Yields a message for each option in `args` that the optimizer does not have, or of which the value is wrong."""
    tables = {"optimizer.args": (optimizer.name, optimizer.args)}
    for group in optimizer.groups:
        tables[f"{describe_group(group)}: args"] = (group.name or optimizer.name, group.args)
    for where, (name, args) in tables.items():
        defaults = OPTIMIZERS[name].args()
        if args and not fields(defaults):
            yield f'{where}.{next(iter(args))}: optimizer "{name}" has no options of its own; remove it'
            continue
        try:
            resolved = overlay(defaults, args, where="args")
        except ConfigError as error:
            yield from (f"{where}{message.removeprefix('args')}" for message in error.messages)
        else:
            yield from find_range_errors(resolved, at=f"{where}.")


def optimizer_state_bytes(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> int:
    """Returns the bytes of the state of parameters, which may be on the meta device, without numbers such as steps."""
    return sum(
        tensor.nbytes
        for group in resolve_groups(optimizer, parameters=parameters)
        for parameter in group.parameters.values()
        for tensor in OPTIMIZERS[group.settings.name].init_state(parameter, group.settings).values()
        if tensor.ndim
    )


def _unusable(optimizer: Optimizer, *, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    for group in resolve_groups(optimizer, parameters=parameters):
        if problem := OPTIMIZERS[group.settings.name].find_problem(group.settings):
            yield f'optimizer "{group.settings.name}" {problem}'


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
