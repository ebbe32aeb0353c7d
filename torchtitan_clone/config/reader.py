"""Reads a Config from TOML files, `extends` chains and --table.key=value arguments.

Settings are kept key by key with their origin, a file and line or the command line, and merged before they are applied
to the dataclasses; every problem is reported with its origin.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import TypeGuard, cast, get_type_hints

try:
    import tomli  # tomllib of Python 3.11 ends the process on a key of 100,000 parts
except ModuleNotFoundError:  # where nothing is installed yet, help is printed and no file is read
    import tomllib as tomli

from torchtitan_clone.config.checks import find_path_errors
from torchtitan_clone.config.compat import FORMER_NAMES, describe_differences, renamed, torchtitan_key
from torchtitan_clone.config.messages import MAX_SHOWN, ConfigError, Excerpt, did_you_mean, nearest_name, shown
from torchtitan_clone.config.overlay import Key, hints_of, overlay_reporting
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.schema_training import FROM_FOLDER
from torchtitan_clone.config.started import find_config, shipped_configs
from torchtitan_clone.documents import DocumentError, escape, read_regular

logger = logging.getLogger("torchtitan_clone")


COMMAND_LINE = "command line"
TABLES: dict[str, dict[str, object]] = {name: get_type_hints(cls) for name, cls in get_type_hints(Config).items()}
"""Type annotation of every option by table and key."""

SHORTHANDS: dict[str, Key] = {
    "dry-run": ("job", "dry_run"), "all": ("job", "dry_run_all"), "device": ("job", "dry_run_device"),
}  # fmt: skip
"""Options by the shorthands that the command line accepts for them."""

MAX_FILE_BYTES = 1 << 20
MAX_VALUES = 4096
"""In one file; merging takes time quadratic in them."""
MAX_DEPTH = 16
MAX_TEXT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value and where it was set: "file:line", or "command line"."""

    value: object
    origin: str
    origin_of: Callable[[Key], str]
    """Returns the origin of a key within the value, for example data.sources.1.name."""


Settings = dict[Key, Setting]
"""Settings by key; tables are flattened to their leaves."""


def parse_arguments(argv: list[str], *, problems: list[str]) -> Settings:
    """Parses command line arguments; adds a message to `problems` for each argument that is not an option."""
    settings: Settings = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if len(name.split(".")) > MAX_DEPTH:
            problems.append(f"{COMMAND_LINE}: {escape(name)[:MAX_SHOWN]}: at most {MAX_DEPTH} keys are accepted")
            continue
        if not word.startswith("--") or not name:
            is_file = word.endswith(".toml") or word in shipped_configs()
            hint = f"; did you mean --job.config_file={word}?" if is_file else ""
            problems.append(f'{COMMAND_LINE}: "{word}" is not an option; write --table.key=value{hint}')
            continue
        path = SHORTHANDS.get(name) or renamed(_option(name))
        origin = COMMAND_LINE
        if switch := None if _is_option(path) else _switched_off(path):
            path, value = switch, False
            if equals:
                rule = f"--{name} takes no value; write --{'.'.join(switch)}=false"
                problems.append(f"{COMMAND_LINE}: {rule}")
        elif equals:
            value = _parse_value(text, path=path)
        elif words and not words[0].startswith("--") and name not in SHORTHANDS:
            value = _parse_value(words.pop(0), path=path)
        else:
            value = True
            origin = f"{COMMAND_LINE}, no value given"
        given = dict(_flatten(value, path=path, origin_of=lambda _, origin=origin: origin))
        merge_into(settings, _without_unusable(given, problems=problems))
    return settings


def _option(name: str) -> Key:
    """Returns the key of an option, in which hyphens stand for underscores, as in --training.local-batch-size."""
    path = tuple(name.split("."))
    written = tuple(key.replace("-", "_") for key in path)
    return written if _is_named(written) or _switched_off(written) else path


def _annotation(path: Key) -> object:
    """Returns the type annotation of an option; None if there is none of that name."""
    found: object = Config
    for key in path:
        found = hints_of(found).get(key) if isinstance(found, type) and is_dataclass(found) else None
    return found


def _is_option(path: Key) -> bool:
    return _annotation(path) is not None


def _is_named(path: Key) -> bool:
    return _is_option(path) or torchtitan_key(".".join(path)) is not None


def _switched_off(path: Key) -> Key | None:
    """Returns the option that --table.no_key sets to false, as programs with tyro write it; None if it is no switch."""
    option = (*path[:-1], path[-1].removeprefix("no_"))
    is_switch = _annotation(option) in (bool, bool | None) or torchtitan_key(".".join(option)) is not None
    return option if option != path and is_switch else None


def _parse_toml(text: str) -> dict[str, object]:
    """Parses TOML; ValueError for what is malformed, nested too deep or too large."""
    try:
        parsed = cast("dict[str, object]", tomli.loads(text))
    except RecursionError:
        raise ValueError(f"nested too deep; at most {MAX_DEPTH} levels are accepted") from None
    except tomli.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit of 4,300 digits
        raise ValueError("an integer has too many digits; at most 64 bits are accepted") from None
    _check_size(parsed)
    return parsed


def _check_size(table: dict[str, object]) -> None:
    level: list[object] = [table]
    seen = 0
    for _ in range(MAX_DEPTH):
        level = [item for parent in level for item in _children(parent)]
        seen += len(level)
        if seen > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        if not level:
            return
    raise ValueError(f"nested too deep; at most {MAX_DEPTH} levels are accepted")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _without_unusable(settings: Settings, *, problems: list[str]) -> Settings:
    """Returns the settings without those that no option can have; reports these."""
    usable: Settings = {}
    for path, setting in settings.items():
        if rule := next((rule for each in (*path, setting.value) if (rule := _unusable(each))), None):
            problems.append(f"{setting.origin}: {escape('.'.join(path))[:MAX_SHOWN]}: {rule}")
        else:
            usable[path] = setting
    return usable


def _unusable(value: object) -> str | None:
    """Returns why no option can have this value or name, or None."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "an integer has more than 64 bits"
    if isinstance(value, str) and "\0" in value:
        return "a text has a null character"
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"a text has {len(value):,} characters; at most {MAX_TEXT:,} are accepted"
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        return "a text is not valid UTF-8"
    return next((rule for item in _children(value) if (rule := _unusable(item))), None)


def _parse_value(text: str, *, path: Key) -> object:
    """Parses a command line value as TOML if it is valid TOML and the option is not a string, else returns the text."""
    try:
        parsed = _parse_toml(f"value = {text}")
    except ValueError:
        return text
    wants_string = len(path) == 2 and TABLES.get(path[0], {}).get(path[1]) in (str, str | None)
    return text if len(parsed) > 1 or (wants_string and not isinstance(parsed["value"], str)) else parsed["value"]


def read_chain(path: Path, *, origin: str, chain: list[Path], settings: Settings, problems: list[str]) -> None:
    """Merges the files of an `extends` chain into `settings` in place, from the outermost base file to `path`."""
    if os.path.realpath(path) in [os.path.realpath(file) for file in chain]:
        problems.append(f"{origin}: job.extends is circular: {' -> '.join(map(str, [*chain, path]))}")
        return
    try:
        found = {renamed(key): setting for key, setting in _read_file(path).items()}
        own = _without_unusable(found, problems=problems)
    except OSError as error:
        hint = did_you_mean(path.name, shipped_configs()) if not path.suffix else ""
        problems.append(f"{origin}: cannot read {path}: {error.strerror}{hint}")
        return
    except DocumentError as error:
        problems.append(f"{origin}: cannot read {path.parent}/{error}")
        return
    except ValueError as error:
        problems.append(_malformed(path, error))
        return
    if (base := own.get(("job", "extends"))) and isinstance(base.value, str):
        file = find_config(base.value, folder=path.parent)
        read_chain(Path(file), origin=base.origin, chain=[*chain, path], settings=settings, problems=problems)
    if misplaced := own.pop(("job", "config_file"), None):
        rule = "job.config_file is only valid on the command line"
        problems.append(f"{misplaced.origin}: {rule}; use job.extends in a file")
    merge_into(settings, own)


def _read_file(path: Path) -> Settings:
    text = _content(path).decode("utf-8-sig")  # Windows adds a mark
    parsed = _parse_toml(text)
    lines = _key_lines(text)

    def origin_of(key: Key) -> str:
        return f"{path}:{next(lines[key[:end]] for end in range(len(key), -1, -1) if key[:end] in lines)}"

    return dict(_flatten(parsed, path=(), origin_of=origin_of))


def _content(path: Path) -> bytes:
    """Returns the content of a regular file; /dev/null, which names no options, counts as one."""
    return b"" if str(path) == os.devnull else read_regular(path, max_bytes=MAX_FILE_BYTES, follow_links=True)


def _malformed(path: Path, error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return f"{path}:{line}: not UTF-8: byte {error.object[error.start]:#04x}; save the file as UTF-8"
    if not isinstance(error, tomli.TOMLDecodeError):
        return f"{path}: {error}"
    found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
    lines = _content(path).decode("utf-8-sig").split("\n")
    line, column = (int(found[1]), int(found[2])) if found and found[1] else (len(lines), len(lines[-1]) + 1)
    while not lines[line - 1].strip() and line > 1:  # the end of a document is often an empty line
        line, column = line - 1, len(lines[line - 2]) + 1
    text = f"{path}:{line}: malformed TOML: {str(error)[: found.start()] if found else error}"
    return Excerpt(f"{escape(text)}\n{_excerpt(lines[line - 1], column=column)}")


def _excerpt(line: str, *, column: int) -> str:
    """Returns what of a line is near a column, counted from 1, and below it a line with a caret at the column."""
    first = max(0, column - 1 - MAX_SHOWN // 2)
    before, after = line[first : column - 1], line[column - 1 : first + MAX_SHOWN]
    return f"{escape(before)}{escape(after.rstrip())}\n{' ' * len(escape(before))}^"


_KEY_SEGMENT = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_KEY = rf"(?:{_KEY_SEGMENT})(?:\s*\.\s*(?:{_KEY_SEGMENT}))*"


def _key_lines(text: str) -> dict[Key, int]:
    """Returns the line of each key, [table] and [[table]], which the TOML parser does not report."""
    lines: dict[Key, int] = {(): 1}
    counts: Counter[Key] = Counter()
    table: Key = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(rf"\s*(\[+)\s*({_KEY})\s*\]", line):
            table = ()
            for segment in _key_segments(header[2]):  # of an array it is in, the last entry
                table = (*table, *([str(counts[table] - 1)] if table in counts else []), segment)
            lines.setdefault(table, number)
            if len(header[1]) > 1:
                counts[table] += 1
                table = (*table, str(counts[table] - 1))
                lines[table] = number
        elif key := re.match(rf"\s*({_KEY})\s*=", line):
            lines.setdefault((*table, *_key_segments(key[1])), number)
    return lines


def _key_segments(key: str) -> Key:
    segments = cast("list[str]", re.findall(_KEY_SEGMENT, key))[:MAX_DEPTH]
    return tuple(segment.strip("\"'") for segment in segments)


def _flatten(value: object, *, path: Key, origin_of: Callable[[Key], str]) -> Iterator[tuple[Key, Setting]]:
    """Yields the leaves of a table; an empty table is a leaf."""
    if _is_table(value):
        for key, item in value.items():
            yield from _flatten(item, path=(*path, key), origin_of=origin_of)
    elif path:
        yield path, Setting(value=value, origin=origin_of(path), origin_of=origin_of)


def flat(table: Mapping[str, object], *, prefix: str = "") -> dict[str, object]:
    """Returns the entries of nested tables by dotted name."""
    options: dict[str, object] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        options |= flat(value, prefix=f"{name}.") if _is_table(value) else {name: value}
    return options


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


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration without the keys that are no options."""

    config: Config
    problems: list[str]
    """One message per key of torchtitan that is not supported, or that nobody knows."""


def load_config(argv: list[str], *, options: Mapping[str, object] | None = None) -> Config:
    """Returns the configuration of these arguments; ConfigError with one message per problem and its file and line.

    `options` are tables, or values by dotted name, which take precedence.
    """
    loaded = read_config(argv, options=options)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.config


def read_config(argv: list[str], *, options: Mapping[str, object] | None = None) -> Loaded:
    """Does the same, but returns what is wrong with the keys of a file for torchtitan: later checks add to it."""
    problems: list[str] = []
    command_line = parse_arguments(argv, problems=problems)
    for name, value in (options or {}).items():
        given = dict(_flatten(value, path=tuple(name.split(".")), origin_of=lambda _: "options"))
        merge_into(command_line, _without_unusable(given, problems=problems))
    settings: Settings = {}
    if config_file := command_line.get(("job", "config_file")):
        file = find_config(str(config_file.value))
        command_line["job", "config_file"] = replace(config_file, value=file)
        read_chain(Path(file), origin=COMMAND_LINE, chain=[], settings=settings, problems=problems)
    if extends := command_line.pop(("job", "extends"), None):
        problems.append(f"{extends.origin}: job.extends is only valid in a file; pass the file as --job.config_file")
    merge_into(settings, command_line)
    foreign = _drop_foreign_keys(settings)

    def report(path: Key, text: str) -> None:  # the origin of a table is that of its first key
        key, setting = next(item for item in settings.items() if item[0][: len(path)] == path[: len(item[0])])
        problems.append(f"{setting.origin_of(max(key, path, key=len))}: {'.'.join(path)}{text}")

    config = overlay_reporting(Config(), _nested(settings), at=(), report=report)
    if config.checkpoint.initial_load_in_hf and not {("model", "name"), ("model", "flavor")} & {*settings}:
        config = replace(config, model=replace(config.model, name=FROM_FOLDER, flavor=FROM_FOLDER))
    problems += find_path_errors(config)
    if problems or (foreign.unknown and not foreign.unsupported):
        raise ConfigError([*foreign.unsupported, *foreign.unknown, *problems])
    if foreign.has_ignored and (differences := describe_differences(config)):
        logger.info("keys of torchtitan: unlike there, %s; see docs/from_torchtitan.md", differences)
    return Loaded(config=config, problems=[*foreign.unsupported, *foreign.unknown])


def load_run_config(argv: list[str], *, default: str = "") -> Config:
    """Returns what is trained with: the file $CONFIG_FILE, else `default`, unless the arguments name one."""
    return load_config(with_file(argv, default=default))


def with_file(argv: list[str], *, default: str) -> list[str]:
    """Returns the arguments, after the file $CONFIG_FILE, else `default`; a file that they name takes precedence."""
    file = os.environ.get("CONFIG_FILE") or default
    return [*([f"--job.config_file={file}"] if file else []), *argv]


@dataclass(frozen=True, kw_only=True)
class ForeignKeys:
    """What was said about the keys that are no options."""

    unsupported: list[str]
    """Messages on keys of torchtitan with an effect that is not available."""
    unknown: list[str]
    """Messages on keys that torchtitan does not have either."""
    has_ignored: bool
    """Whether there are keys of torchtitan that are ignored."""


def _drop_foreign_keys(settings: Settings) -> ForeignKeys:
    """Removes the keys that are no options; logs those of torchtitan without effect."""
    unsupported: list[str] = []
    unknown: list[str] = []
    has_ignored = False
    without_effect: list[str] = []
    values = {".".join(path): setting.value for path, setting in settings.items()}
    reported: set[Key] = set()
    for path in [path for path in settings if not _is_known(path)]:
        setting = settings.pop(path)
        name = ".".join(path)
        text = f"{setting.origin}: {name} = {shown(setting.value)}"
        option = path[:2] if path[0] in TABLES else path[:1]
        if foreign := torchtitan_key(f"{name}." if setting.value == {} else name):
            if foreign.is_harmless(setting.value, values=values):
                without_effect.append(name)
            elif not foreign.is_error:
                has_ignored = True
                logger.warning("%s is ignored: %s", text, foreign.reason)
            else:
                unsupported.append(f"{text}: {foreign.reason}")
        elif option not in reported:
            reported.add(option)
            unknown.append(f"{setting.origin}: {_unknown(path)}")
    if without_effect:
        logger.info("keys of torchtitan without effect here, ignored: %s", ", ".join(without_effect))
    return ForeignKeys(unsupported=unsupported, unknown=unknown, has_ignored=has_ignored or bool(without_effect))


def _is_known(path: Key) -> bool:
    is_option = path[0] in TABLES and (len(path) == 1 or path[1] in TABLES[path[0]])
    return is_option and torchtitan_key(".".join(path)) is None


def _unknown(path: Key) -> str:
    table = path[0]
    key = path[min(1, len(path) - 1)]
    if former := FORMER_NAMES.get(".".join(path)):
        return f"{'.'.join(path)}: unknown option; did you mean {former}?"
    elsewhere = _options_with(key)
    if table in TABLES:
        hint = f"; did you mean {elsewhere}?" if elsewhere else did_you_mean(key, TABLES[table], prefix=table)
        return f"{'.'.join(path)}: unknown option{hint}"
    if len(path) == 1 and elsewhere:
        return f"{table}: options must be in a table; did you mean {elsewhere}?"
    keys = [key for options in TABLES.values() for key in options]
    if len(path) == 1 and not nearest_name(table, TABLES) and (near := nearest_name(table, keys)):
        return f"{table}: unknown option; did you mean {_options_with(near)}?"
    return f"[{table}]: unknown table{did_you_mean(table, TABLES)}"


def _options_with(key: str) -> str:
    return " or ".join(f"{name}.{key}" for name in TABLES if key in TABLES[name])


def _nested(settings: Settings) -> dict[str, object]:
    nested: dict[str, object] = {}
    for path, setting in settings.items():
        table = nested
        for key in path[:-1]:
            table = cast("dict[str, object]", table.setdefault(key, {}))
        table[path[-1]] = setting.value
    return nested
