"""What messages are made of: ConfigError, values as TOML, the nearest known name, and remedies."""

import difflib
import json
import math
import re
import types
from collections.abc import Iterable
from typing import Literal, Union, cast, get_args, get_origin

from torchtitan_clone.documents import escape

SHOWN_PROBLEMS = 25
MAX_SHOWN = 200
_DESCRIPTIONS: dict[object, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
REQUIREMENTS = {
    "datasets": "datasets>=4,<6",
    "lm_eval": "lm_eval>=0.4.9",
    "obstore": "obstore>=0.8",
    "plotly": "plotly>=6,<8",
    "sentencepiece": "sentencepiece>=0.2",
    "torchao": "torchao>=0.18",
    "torchft": "torchft==0.2.0",
    "wandb": "wandb>=0.31",
}
"""Packages that a run may lack, as in pyproject.toml."""


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


def install(package: str) -> str:
    """Returns the command that installs a package, in a checkout and elsewhere."""
    return f'pip install "{REQUIREMENTS[package]}"'


def nearest_divisors(number: int, target: int) -> list[int]:
    """Returns up to four divisors of `number` nearest to `target` in ratio, in ascending order."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    divisors = {*small, *(number // count for count in small)}
    return sorted(sorted(divisors, key=lambda count: abs(math.log(count / target)))[:4])


def nearest_multiples(number: int, target: int) -> list[int]:
    """Returns the positive multiples of `number` just below and just above `target`."""
    below = target // number * number
    return [count for count in (below, below + number) if count > 0]


def either(numbers: list[int]) -> str:
    """Formats numbers as "1, 2 or 3"."""
    *head, last = map(str, numbers)
    return f"{', '.join(head)} or {last}" if head else last
