"""Applies external values to a dataclass, checked by name and type; converts only an integer to a declared float."""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from torchtitan_clone.config.messages import ConfigError, describe, did_you_mean, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Key = tuple[str, ...]
"""A dotted key as a tuple: ("training", "steps")."""
Report = Callable[[Key, str], None]
"""Receives the key of a problem and its description."""
_REJECTED = object()


def overlay(base: T, values: Mapping[str, object], *, where: str) -> T:
    """Returns a copy of the dataclass `base`, named `where`, updated with `values`; ConfigError with all problems."""
    problems: list[str] = []

    def report(path: Key, text: str) -> None:
        problems.append(f"{'.'.join(path)}{text}")

    result = overlay_reporting(base, values, at=tuple(where.split(".")), report=report)
    if problems:
        raise ConfigError(problems)
    return result


def overlay_reporting(base: T, values: Mapping[str, object], *, at: Key, report: Report) -> T:
    """Does the same as overlay(), but passes each problem to `report`, which knows the origin of the key."""
    cls = cast("type[DataclassInstance]", type(base))
    return cast("T", _convert_table(values, cls, current=base, at=at, report=report))


def _convert(value: object, annotation: object, *, current: object, at: Key, report: Report) -> object:
    """Returns the value converted to the annotated type, or _REJECTED after a report."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin in (types.UnionType, Union):
        (wanted,) = [arg for arg in args if arg is not type(None)]
        return _convert(value, wanted, current=current, at=at, report=report)
    if _is_table(annotation) and isinstance(value, Mapping):
        return _convert_table(cast("Mapping[str, object]", value), annotation, current=current, at=at, report=report)
    if origin is list and isinstance(value, list):
        items = [
            _convert(item, args[0], current=None, at=(*at, str(place)) if _is_table(args[0]) else at, report=report)
            for place, item in enumerate(cast("list[object]", value))
        ]
        return _REJECTED if _REJECTED in items else items
    if origin is dict and isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        if args[1] is object:
            return entries
        kept = {
            key: _convert(item, args[1], current=None, at=(*at, key), report=report) for key, item in entries.items()
        }
        return _REJECTED if _REJECTED in kept.values() else kept
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is annotation or any(type(value) is type(choice) and value == choice for choice in args):
        return value
    same = [shown(choice) for choice in args if origin is Literal and str(choice).casefold() == str(value).casefold()]
    report(at, f" = {shown(value)}: must be {describe(annotation)}{f'; did you mean {same[0]}?' if same else ''}")
    return _REJECTED


def _is_table(annotation: object) -> "TypeGuard[type[DataclassInstance]]":
    return isinstance(annotation, type) and is_dataclass(annotation)


hints_of = cache(get_type_hints)


def _convert_table(
    values: Mapping[str, object], cls: "type[DataclassInstance]", *, current: object, at: Key, report: Report
) -> object:
    """Returns `current`, or if it is None a new `cls`, with the values that fit; reports the others."""
    required = [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]
    if current is None and (absent := [name for name in required if name not in values]):
        report(at, f": missing required key {', '.join(absent)}")
    elif current is None and not values:
        report(at, " = {}: must have a key; remove it to leave it unset")
    hints = hints_of(cls)
    accepted: dict[str, object] = {}
    for name, value in values.items():
        path = (*at, name)
        if name not in hints:
            report(path, f": unknown option{did_you_mean(name, hints, prefix='.'.join(at))}")
            continue
        converted = _convert(value, hints[name], current=getattr(current, name, None), at=path, report=report)
        if converted is not _REJECTED:
            accepted[name] = converted
    if current is not None:
        return replace(cast("DataclassInstance", current), **accepted)
    return cast("Callable[..., object]", cls)(**accepted) if set(required) <= accepted.keys() else _REJECTED
