"""Renders a Config as TOML, and all options as help text."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import cast, get_args, get_type_hints

from torchtitan_clone.config import schema, schema_cluster, schema_training
from torchtitan_clone.config.checks import ranges_of
from torchtitan_clone.config.messages import ConfigError, describe, did_you_mean, shown, toml_key, toml_like
from torchtitan_clone.config.resolved import run_name
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.started import as_started

_NOT_SAVED = ("config_file", "extends", "dry_run", "dry_run_all", "dry_run_device")
"""Options of [job] that locate the configuration of one launch and are not part of the run."""

_INTRO = """\
Trains the language model described by a TOML file.

  ./run_train.sh --training.steps=20 --optimizer.lr=1e-3
  CONFIG_FILE=my_run.toml ./run_train.sh
  python -m torchtitan_clone.train --job.config_file=my_run.toml

Set an option in the file, as `key = value` under its [table], or on the command line, as --table.key=value. The command
line overrides the file, the file overrides its base file (job.extends), and the base file overrides the defaults.
--table.key without a value means true. --dry-run validates the configuration, prints what differs from the defaults, or
with --all all options, and the run plan, and exits. --help TABLE shows one table, --help WORD the options with a word.
"""
_ALWAYS_SHOWN = ("model.name", "model.flavor")


def to_toml(config: Config) -> str:
    """Returns the complete configuration as TOML without unset options; loading it gives an equal configuration."""
    return _toml(_saved_tables(config))


def changes_to_toml(config: Config) -> str:
    """Returns the model and the options that differ from their defaults, as TOML."""
    defaults = asdict(Config())
    return _toml(
        {
            name: {k: v for k, v in table.items() if v != defaults[name][k] or f"{name}.{k}" in _ALWAYS_SHOWN}
            for name, table in _saved_tables(config).items()
        }
    )


def _saved_tables(config: Config) -> dict[str, dict[str, object]]:
    tables: dict[str, dict[str, object]] = asdict(config)
    job = {key: value for key, value in tables["job"].items() if key not in _NOT_SAVED}
    return tables | {"job": job | {"run_name": run_name(config.job)}}


def _toml(tables: dict[str, dict[str, object]]) -> str:
    blocks: list[str] = []
    for name, table in tables.items():
        pairs = [f"{toml_key(key)} = {toml_like(value)}\n" for key, value in table.items() if value is not None]
        blocks += ["".join([f"[{name}]\n", *pairs])] if table else []
    return "\n".join(blocks)


def help_text(words: Sequence[str] = ()) -> str:
    """Returns every option with its type, default and docstring, grouped by table.

    `words` selects the tables of these names and, for other words, the options that have all of them in name or text.
    ConfigError if there are none.
    """
    tables: dict[str, type] = get_type_hints(Config)
    chosen = {name: tables[name] for name in words if name in tables}
    wanted = [word.lower() for word in words if word not in tables]
    lines = [] if words else [_INTRO]
    for name, table in (chosen or tables).items():
        found = [
            entry
            for entry in _entries_of(table, prefix=f"--{name}.")
            if all(word in " ".join(entry.lower().split()) for word in wanted)
        ]
        lines += [f"[{name}]  {inspect.getdoc(table)}", *found, ""] if found else []
    if not lines:
        rule = f"no table or option has this name or text{did_you_mean(words[0], tables)}"
        raise ConfigError(f"--help {shown(' '.join(words))}: {rule}")
    return as_started("\n".join(lines))


def _entries_of(table: type, *, prefix: str) -> Iterator[str]:
    """Yields the help on each option of a table, with the keys of those that are lists of tables."""
    entry: list[str] = []
    for line in _describe_fields(table, prefix=prefix):
        if entry and line.startswith(f"  {prefix}"):
            yield "\n".join(entry)
            entry = []
        entry.append(line)
    yield "\n".join(entry)


def _describe_fields(table: type, *, prefix: str, indent: str = "  ") -> Iterator[str]:
    """Yields help on each field of a table; the keys of an option that is a list of tables follow it."""
    docs = _docs_by_class()[table.__name__]
    hints = get_type_hints(table)
    ranges = ranges_of(table)
    for field in fields(table):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _describe_fields(cast("type", hint), prefix=f"{prefix}{field.name}.")
            continue
        within = f" {ranges[field.name].describe()}" if field.name in ranges else ""
        yield f"{indent}{prefix}{field.name}  ({describe(hint)}{within}; {_describe_default(field)})"
        yield textwrap.indent(textwrap.fill(docs[field.name], min(110, 116 - len(indent))), f"{indent}    ")
        if items := [item for item in get_args(hint) if is_dataclass(item)]:
            yield from _describe_fields(cast("type", items[0]), prefix="", indent=f"{indent}      ")


def _describe_default(field: Field[object]) -> str:
    if field.default_factory is not MISSING:
        return f"default {toml_like(field.default_factory())}"
    if field.default is MISSING:
        return "required"
    return f"default {'unset' if field.default is None else toml_like(field.default)}"


def option_docs() -> dict[str, dict[str, str]]:
    """Returns the docstring of every documented option by table and key."""
    return {name: _docs_by_class()[table.__name__] for name, table in get_type_hints(Config).items()}


@cache
def _docs_by_class() -> dict[str, dict[str, str]]:
    """Returns the docstring of every field by class and name, parsed from the schema's source."""
    trees = [ast.parse(inspect.getsource(module)) for module in (schema, schema_cluster, schema_training)]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    docs: dict[str, dict[str, str]] = {node.name: {} for node in classes}
    for node in classes:
        for pair in pairwise(node.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[node.name][name] = inspect.cleandoc(text)
                case _:
                    pass
    return docs
