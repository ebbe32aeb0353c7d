"""Loads a Config from TOML files and --table.key=value arguments, merged key by key before they are validated."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torchtitan_clone.config.checks import find_path_errors
from torchtitan_clone.config.overlay import ConfigError, Key, did_you_mean, nearest_name, overlay_reporting, shown
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.sources import COMMAND_LINE, TABLES, Settings, merge_into, parse_arguments, read_chain
from torchtitan_clone.config.torchtitan_compat import FORMER_NAMES, describe_differences, torchtitan_key

logger = logging.getLogger("torchtitan_clone")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration without the keys that are no options."""

    config: Config
    problems: list[str]
    """One message per key of torchtitan that is not supported, or that nobody knows."""


def load_config(argv: list[str]) -> Config:
    """Returns the configuration of these arguments; ConfigError with one message per problem and its file and line."""
    loaded = read_config(argv)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.config


def read_config(argv: list[str]) -> Loaded:
    """Does the same, but returns what is wrong with the keys of a file for torchtitan: later checks add to it."""
    problems: list[str] = []
    command_line = parse_arguments(argv, problems=problems)
    settings: Settings = {}
    if config_file := command_line.get(("job", "config_file")):
        read_chain(Path(str(config_file.value)), origin=COMMAND_LINE, chain=[], settings=settings, problems=problems)
    if extends := command_line.pop(("job", "extends"), None):
        problems.append(f"{extends.origin}: job.extends is only valid in a file; pass the file as --job.config_file")
    merge_into(settings, command_line)
    foreign = _drop_foreign_keys(settings)

    def report(path: Key, text: str) -> None:  # the origin of a table is that of its first key
        key, setting = next(item for item in settings.items() if item[0][: len(path)] == path[: len(item[0])])
        problems.append(f"{setting.origin_of(max(key, path, key=len))}: {'.'.join(path)}{text}")

    config = overlay_reporting(Config(), _nested(settings), at=(), report=report)
    problems += find_path_errors(config)
    if problems or (foreign.unknown and not foreign.unsupported):
        raise ConfigError([*foreign.unsupported, *foreign.unknown, *problems])
    if foreign.has_ignored and (differences := describe_differences(config)):
        logger.info("keys of torchtitan: unlike there, %s; see docs/from_torchtitan.md", differences)
    return Loaded(config=config, problems=[*foreign.unsupported, *foreign.unknown])


def load_run_config(argv: list[str], *, default: str = "") -> Config:
    """Returns what run_train.sh trains with: the file $CONFIG_FILE, else `default`, unless the arguments name one."""
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
            if foreign.is_harmless(setting.value, switch=values.get(foreign.tunes)):
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
