"""Applies external values to a dataclass, checked by name and type; converts only an integer to a declared float."""

import difflib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from torchtitan_clone.documents import escape

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Key = tuple[str, ...]
"""A dotted key as a tuple: ("training", "steps")."""
Report = Callable[[Key, str], None]
"""Receives the key of a problem and its description."""
SHOWN_PROBLEMS = 25
MAX_SHOWN = 200

_REJECTED = object()
_DESCRIPTIONS: dict[object, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class ConfigError(Exception):
    """Error that the user can correct; holds one message per problem and prints each on a line."""

    def __init__(self, messages: str | list[str]) -> None:
        self.messages = [messages] if isinstance(messages, str) else messages
        super().__init__(self.messages)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return _on_lines(self.messages[0])
        lines = [f"{len(self.messages)} problems in the configuration:"]
        lines += [f"  - {_on_lines(message)}" for message in self.messages[:SHOWN_PROBLEMS]]
        if len(self.messages) > SHOWN_PROBLEMS:
            lines.append(f"  and {len(self.messages) - SHOWN_PROBLEMS} more")
        return "\n".join(lines)


class Excerpt(str):
    """A message on lines of its own: what is wrong, then the line of a file and a caret below the place."""


def _on_lines(message: str) -> str:
    """Returns a message on one line, an excerpt on its indented lines, so that nothing in it can forge a line."""
    lines = message.split("\n") if isinstance(message, Excerpt) else [message]
    return "\n    ".join(map(escape, lines))


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


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar, whatever the case of its letters; None if none is."""
    names = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Returns '; did you mean x?' if a known name is similar, else the list of known names."""
    names = list(known)
    near = nearest_name(name, names)
    return f"; did you mean {'.'.join(filter(None, (prefix, near)))}?" if near else f"; known: {', '.join(names)}"


def no_such(option: str, value: str, *, what: str, known: Iterable[str]) -> str:
    """Returns the message for an option that names what a dict lacks: the nearest name, and all that are known."""
    names = list(known)
    near = nearest_name(value, names)
    hint = f" (did you mean {shown(near)}?)" if near else ""
    return f"{option} = {shown(value)}: no such {what}{hint}; known: {', '.join(names)}"


def describe(annotation: object) -> str:
    """Describes the values that a type annotation accepts."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Literal:
        return " | ".join(toml_like(choice) for choice in args)
    if origin in (types.UnionType, Union):
        return " or ".join(describe(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"a list, each item {describe(args[0])}"
    return _DESCRIPTIONS.get(annotation, "a table")


def toml_like(value: object) -> str:
    """Formats a plain value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            shown = json.dumps(value, ensure_ascii=False)
            if shown.isprintable():
                return shown
            return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in shown)
        case list():
            return f"[{', '.join(toml_like(item) for item in cast('list[object]', value))}]"
        case dict():
            # TOML has no null.
            pairs = [(key, item) for key, item in cast("dict[str, object]", value).items() if item is not None]
            return f"{{{', '.join(f'{toml_key(key)} = {toml_like(item)}' for key, item in pairs)}}}"
        case _:
            return str(value)


def shown(value: object) -> str:
    """Formats a plain value as TOML for a message: on one line and not too long."""
    text = escape(toml_like(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def toml_key(key: str) -> str:
    """Formats a key as TOML: bare if its characters allow."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_like(key)


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
