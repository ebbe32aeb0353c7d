"""Values from outside laid over a dataclass, checked by name and type.

Nothing is coerced: "3" is no integer, true is no 1. The one widening is Python's own, an integer where a float is
declared. Every problem is collected, so that a user sees all of them at once.
"""

import difflib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Path = tuple[str, ...]
"""A key as its parts: ("training", "steps")."""
Report = Callable[[Path, str], None]
"""Takes the key that a problem is about and the sentence about it."""
SHOWN_PROBLEMS = 25

_REJECTED = object()
_WORDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


class ConfigError(Exception):
    """What a user can put right: one message for each thing that is wrong, all of them printed at once."""

    def __init__(self, messages: str | list[str]) -> None:
        self.messages = [messages] if isinstance(messages, str) else messages
        super().__init__(self.messages)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return self.messages[0]
        lines = [f"{len(self.messages)} problems in the configuration:"]
        lines += [f"  - {message}" for message in self.messages[:SHOWN_PROBLEMS]]
        if len(self.messages) > SHOWN_PROBLEMS:
            lines.append(f"  and {len(self.messages) - SHOWN_PROBLEMS} more")
        return "\n".join(lines)


def overlay(base: T, values: Mapping[str, Any], *, where: str) -> T:
    """A copy of the dataclass `base` with `values` in it; `where` is how the user calls it, e.g. "model.args".

    A table goes over a nested dataclass field by field. ConfigError lists every unknown name and wrong type.
    """
    problems: list[str] = []
    start = tuple(where.split("."))
    result = overlay_reporting(
        base, values, at=start, report=lambda path, text: problems.append(f"{'.'.join(path)}{text}")
    )
    if problems:
        raise ConfigError(problems)
    return result


def overlay_reporting(base: T, values: Mapping[str, Any], *, at: Path, report: Report) -> T:
    """overlay() for a caller that knows where each key came from and words the message itself."""
    current = {field.name: getattr(base, field.name) for field in fields(cast("DataclassInstance", base))}
    changes = _converted_fields(type(base), values, current=current, at=at, report=report)
    return cast("T", replace(cast("DataclassInstance", base), **changes))


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """'; did you mean x?' where a known name is near, else the known names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {'.'.join(filter(None, (prefix, near[0])))}?" if near else f"; known: {', '.join(names)}"


def describe(annotation: Any) -> str:
    """What an annotation admits, in a user's words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(toml_like(choice) for choice in args)
    if origin in (types.UnionType, Union):
        return " or ".join(describe(arg) for arg in args if arg is not type(None))
    if origin is list:
        return f"a list, each item {describe(args[0])}"
    return _WORDS.get(annotation, "a table")


def toml_like(value: Any) -> str:
    """A plain value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(toml_like(item) for item in cast('list[Any]', value))}]"
        case dict():
            # What is unset is left out, since TOML has no word for it.
            pairs = [(key, item) for key, item in cast("dict[str, Any]", value).items() if item is not None]
            return f"{{{', '.join(f'{toml_key(key)} = {toml_like(item)}' for key, item in pairs)}}}"
        case _:
            return str(value)


def toml_key(key: str) -> str:
    """A key as TOML writes it: bare where its characters allow."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_like(key)


def _convert(value: Any, annotation: Any, *, current: Any, at: Path, report: Report) -> Any:
    """The value as the annotation wants it, or _REJECTED after a report."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union):
        (annotation,) = [arg for arg in args if arg is not type(None)]
        return _convert(value, annotation, current=current, at=at, report=report)
    if is_dataclass(annotation) and isinstance(value, Mapping):
        return _convert_table(cast("Mapping[str, Any]", value), annotation, current=current, at=at, report=report)
    if origin is list and isinstance(value, list):
        items = [_convert(item, args[0], current=None, at=at, report=report) for item in cast("list[Any]", value)]
        return _REJECTED if _REJECTED in items else items
    if origin is dict and isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is annotation or any(type(value) is type(choice) and value == choice for choice in args):
        return value
    report(at, f" = {toml_like(value)}: must be {describe(annotation)}")
    return _REJECTED


def _convert_table(values: Mapping[str, Any], cls: Any, *, current: Any, at: Path, report: Report) -> Any:
    if is_dataclass(current):
        return overlay_reporting(current, values, at=at, report=report)
    required = [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]
    if absent := [name for name in required if name not in values]:
        report(at, f": the table needs {', '.join(absent)} too")
    given = _converted_fields(cls, values, current={}, at=at, report=report)
    return cls(**given) if set(required) <= given.keys() else _REJECTED


def _converted_fields(
    cls: type, values: Mapping[str, Any], *, current: Mapping[str, Any], at: Path, report: Report
) -> dict[str, Any]:
    """The values that fit a field of `cls`, converted; the others are reported and left out."""
    hints = get_type_hints(cls)
    accepted: dict[str, Any] = {}
    for name, value in values.items():
        path = (*at, name)
        if name not in hints:
            report(path, f": there is no such option{did_you_mean(name, hints, prefix='.'.join(at))}")
            continue
        converted = _convert(value, hints[name], current=current.get(name), at=path, report=report)
        if converted is not _REJECTED:
            accepted[name] = converted
    return accepted
