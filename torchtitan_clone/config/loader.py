"""Loads a Config from TOML files and --table.key=value arguments, merged key by key before they are validated."""

import logging
from pathlib import Path
from typing import cast

from torchtitan_clone.config.overlay import ConfigError, Key, did_you_mean, overlay_reporting, toml_like
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.sources import COMMAND_LINE, TABLES, Settings, merge_into, parse_arguments, read_chain
from torchtitan_clone.config.torchtitan_compat import torchtitan_key

logger = logging.getLogger("torchtitan_clone")


def load_config(argv: list[str]) -> Config:
    """Returns the configuration of these arguments; ConfigError with one message per problem and its file and line."""
    problems: list[str] = []
    command_line = parse_arguments(argv, problems=problems)
    settings: Settings = {}
    if config_file := command_line.get(("job", "config_file")):
        read_chain(Path(str(config_file.value)), origin=COMMAND_LINE, chain=[], settings=settings, problems=problems)
    if extends := command_line.pop(("job", "extends"), None):
        problems.append(f"{extends.origin}: job.extends is only valid in a file; pass the file as --job.config_file")
    merge_into(settings, command_line)
    _drop_foreign_keys(settings, problems=problems)

    def report(path: Key, text: str) -> None:  # the origin of a table is that of its first key
        origin = next(setting.origin for key, setting in settings.items() if key[: len(path)] == path[: len(key)])
        problems.append(f"{origin}: {'.'.join(path)}{text}")

    config = overlay_reporting(Config(), _nested(settings), at=(), report=report)
    if problems:
        raise ConfigError(problems)
    return config


def _drop_foreign_keys(settings: Settings, *, problems: list[str]) -> None:
    """Removes the keys that are no options: logs those of torchtitan without effect, and reports the others."""
    values = {".".join(path): setting.value for path, setting in settings.items()}
    reported: set[Key] = set()
    for path in [path for path in settings if not _is_known(path)]:
        setting = settings.pop(path)
        name = ".".join(path)
        shown = f"{setting.origin}: {name} = {toml_like(setting.value)}"
        option = path[:2] if path[0] in TABLES else path[:1]
        if foreign := torchtitan_key(f"{name}." if setting.value == {} else name):
            if foreign.is_harmless(setting.value, switch=values.get(foreign.tunes)):
                logger.info("%s is ignored: it has no effect here", shown)
            else:
                problems.append(f"{shown}: {foreign.reason}")
        elif option not in reported:
            reported.add(option)
            problems.append(f"{setting.origin}: {_unknown(path)}")


def _is_known(path: Key) -> bool:
    return path[0] in TABLES and (len(path) == 1 or path[1] in TABLES[path[0]])


def _unknown(path: Key) -> str:
    table = path[0]
    key = path[min(1, len(path) - 1)]
    elsewhere = " or ".join(f"{name}.{key}" for name in TABLES if key in TABLES[name])
    if table in TABLES:
        hint = f"; did you mean {elsewhere}?" if elsewhere else did_you_mean(key, TABLES[table], prefix=table)
        return f"{'.'.join(path)}: unknown option{hint}"
    if len(path) == 1 and elsewhere:
        return f"{table}: options must be in a table; did you mean {elsewhere}?"
    return f"[{table}]: unknown table{did_you_mean(table, TABLES)}"


def _nested(settings: Settings) -> dict[str, object]:
    nested: dict[str, object] = {}
    for path, setting in settings.items():
        table = nested
        for key in path[:-1]:
            table = cast("dict[str, object]", table.setdefault(key, {}))
        table[path[-1]] = setting.value
    return nested
