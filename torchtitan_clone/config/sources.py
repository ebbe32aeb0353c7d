"""Settings as the user wrote them, key by key, with their origin: TOML files, `extends` chains, the command line."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, cast, get_type_hints

import tomli

from torchtitan_clone.config.overlay import Key
from torchtitan_clone.config.schema import Config
from torchtitan_clone.documents import DocumentError, read_regular

COMMAND_LINE = "command line"
MAX_FILE_BYTES = 1 << 22
TABLES: dict[str, dict[str, object]] = {name: get_type_hints(cls) for name, cls in get_type_hints(Config).items()}
"""Type annotation of every option by table and key."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value and where it was set: "file:line", or "command line"."""

    value: object
    origin: str


Settings = dict[Key, Setting]
"""Settings by key; tables are flattened to their leaves."""


def parse_arguments(argv: list[str], *, problems: list[str]) -> Settings:
    """Parses command line arguments; adds a message to `problems` for each argument that is not an option."""
    settings: Settings = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            hint = f"; did you mean --job.config_file={word}?" if word.endswith(".toml") else ""
            problems.append(f'{COMMAND_LINE}: "{word}" is not an option; write --table.key=value{hint}')
            continue
        path = ("job", "dry_run") if name == "dry-run" else tuple(name.split("."))
        origin = COMMAND_LINE
        if equals:
            value = _parse_value(text, path=path)
        elif words and not words[0].startswith("--") and name != "dry-run":
            value = _parse_value(words.pop(0), path=path)
        else:
            value = True
            origin = f"{COMMAND_LINE}, no value given"
        merge_into(settings, dict(_flatten(value, path=path, origin_of=lambda _, origin=origin: origin)))
    return settings


def _parse_value(text: str, *, path: Key) -> object:
    """Parses a command line value as TOML if it is valid TOML and the option is not a string, else returns the text."""
    try:
        parsed = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    wants_string = len(path) == 2 and TABLES.get(path[0], {}).get(path[1]) in (str, str | None)
    return text if len(parsed) > 1 or (wants_string and not isinstance(parsed["value"], str)) else parsed["value"]


def read_chain(path: Path, *, origin: str, chain: list[Path], settings: Settings, problems: list[str]) -> None:
    """Merges the files of an `extends` chain into `settings` in place, from the outermost base file to `path`."""
    if path.resolve() in [file.resolve() for file in chain]:
        problems.append(f"{origin}: job.extends is circular: {' -> '.join(map(str, [*chain, path]))}")
        return
    try:
        own = _read_file(path)
    except OSError as error:
        problems.append(f"{origin}: cannot read {path}: {error.strerror}")
        return
    except DocumentError as error:
        problems.append(f"{origin}: cannot read {path}: {error}")
        return
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(_malformed(path, error))
        return
    if (base := own.get(("job", "extends"))) and isinstance(base.value, str):
        file = path.parent / base.value
        read_chain(file, origin=base.origin, chain=[*chain, path], settings=settings, problems=problems)
    if misplaced := own.pop(("job", "config_file"), None):
        rule = "job.config_file is only valid on the command line"
        problems.append(f"{misplaced.origin}: {rule}; use job.extends in a file")
    merge_into(settings, own)


def _read_file(path: Path) -> Settings:
    text = _content(path).decode()
    lines = _key_lines(text)

    def origin_of(key: Key) -> str:
        return f"{path}:{next(lines[key[:end]] for end in range(len(key), -1, -1) if key[:end] in lines)}"

    return dict(_flatten(tomli.loads(text), path=(), origin_of=origin_of))


def _content(path: Path) -> bytes:
    """Returns the content of a regular file; /dev/null, which names no options, counts as one."""
    return b"" if str(path) == os.devnull else read_regular(path, max_bytes=MAX_FILE_BYTES, follow_links=True)


def _malformed(path: Path, error: tomli.TOMLDecodeError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"{path}:{line}: not UTF-8: byte {error.object[error.start]:#04x}; save the file as UTF-8"
    found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
    line = found[1] if found and found[1] else len(_content(path).splitlines())
    return f"{path}:{line}: malformed TOML: {str(error)[: found.start()] if found else error}"


_KEY_SEGMENT = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_KEY = rf"(?:{_KEY_SEGMENT})(?:\s*\.\s*(?:{_KEY_SEGMENT}))*"


def _key_lines(text: str) -> dict[Key, int]:
    """Returns the line of each key and [table], which the TOML parser does not report."""
    lines: dict[Key, int] = {(): 1}
    table: Key = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(rf"\s*\[+\s*({_KEY})\s*\]", line):
            table = _key_segments(header[1])
            lines.setdefault(table, number)
        elif key := re.match(rf"\s*({_KEY})\s*=", line):
            lines.setdefault((*table, *_key_segments(key[1])), number)
    return lines


def _key_segments(key: str) -> Key:
    return tuple(segment.strip("\"'") for segment in cast("list[str]", re.findall(_KEY_SEGMENT, key)))


def _flatten(value: object, *, path: Key, origin_of: Callable[[Key], str]) -> Iterator[tuple[Key, Setting]]:
    """Yields the leaves of a table; an empty table is a leaf."""
    if _is_table(value):
        for key, item in value.items():
            yield from _flatten(item, path=(*path, key), origin_of=origin_of)
    elif path:
        yield path, Setting(value=value, origin=origin_of(path))


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict) and value != {}


def merge_into(settings: Settings, upper: Settings) -> None:
    """Merges `upper` into `settings` in place: a value replaces a table with the same key and vice versa."""
    for path, setting in upper.items():
        replaced = [other for other in settings if other[: len(path)] == path]
        if setting.value == {} and replaced:
            continue
        for other in [*replaced, *(path[:end] for end in range(1, len(path)))]:
            settings.pop(other, None)
        settings[path] = setting
