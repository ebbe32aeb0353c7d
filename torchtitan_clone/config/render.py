"""Renders a Config as TOML, and all options as help text."""

import ast
import inspect
import textwrap
from dataclasses import asdict, fields
from typing import Any, get_type_hints

from torchtitan_clone.config import schema
from torchtitan_clone.config.overlay import describe, toml_key, toml_like
from torchtitan_clone.config.resolved import run_name
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.sources import TABLES

_NOT_SAVED = ("config_file", "extends", "dry_run")
"""Options of [job] that locate the configuration of one launch and are not part of the run."""

_INTRO = """\
Trains the language model described by a TOML file.

  ./run_train.sh --training.steps=20 --optimizer.lr=1e-3
  CONFIG_FILE=my_run.toml ./run_train.sh
  python -m torchtitan_clone.train --job.config_file=my_run.toml

Set an option in the file, as `key = value` under its [table], or on the command line, as --table.key=value. The command
line overrides the file, the file overrides its base file (job.extends), and the base file overrides the defaults.
--table.key without a value means true. --dry-run validates the configuration, prints the run plan and exits.
"""


def to_toml(config: Config) -> str:
    """Returns the complete configuration as TOML; loading it again gives an equal configuration.

    Unset options are omitted, since TOML has no null.
    """
    tables: dict[str, dict[str, object]] = asdict(config)
    job = {key: value for key, value in tables["job"].items() if key not in _NOT_SAVED}
    tables["job"] = job | {"run_name": run_name(config.job)}
    lines: list[str] = []
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{toml_key(key)} = {toml_like(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines[1:]) + "\n"


def help_text() -> str:
    """Returns every option with its type, default and docstring, grouped by table."""
    documented = option_docs()
    blocks = [_INTRO]
    tables: dict[str, Any] = vars(Config())
    for table, section in tables.items():
        lines = [f"[{table}]  {inspect.getdoc(section)}"]
        for field in fields(section):
            default = getattr(section, field.name)
            shown = "unset" if default is None else toml_like(default)
            lines.append(f"  --{table}.{field.name}  ({describe(TABLES[table][field.name])}; default {shown})")
            lines.append(textwrap.indent(textwrap.fill(documented[table][field.name], 110), " " * 6))
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def option_docs() -> dict[str, dict[str, str]]:
    """Returns the docstring of every documented option by table and key, parsed from the schema's source."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)}
    return {name: _field_docs(classes[cls.__name__]) for name, cls in get_type_hints(Config).items()}


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
            case _:
                pass
    return docs
