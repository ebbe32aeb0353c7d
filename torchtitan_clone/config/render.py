"""A Config as TOML, and the options as help text."""

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

_OF_ONE_START = ("config_file", "extends", "dry_run")
"""Options of [job] that say how one start finds its configuration, not what the run is."""

_INTRO = """\
Trains a language model that one TOML file describes.

  ./run_train.sh --training.steps=20 --optimizer.lr=1e-3
  CONFIG_FILE=my_run.toml ./run_train.sh
  python -m torchtitan_clone.train --job.config_file=my_run.toml

Every option below can stand in the file, as `key = value` under its [table], or on the command line, as
--table.key=value. The command line goes over the file, the file over the one it names in job.extends, and that over the
defaults. --table.key alone means true. --dry-run checks everything, prints what would run, and exits.
"""


def to_toml(config: Config) -> str:
    """The whole configuration as TOML from which the same run goes on: loaded again, it is equal.

    What is unset is left out, since TOML has no word for it.
    """
    tables: dict[str, dict[str, Any]] = asdict(config)
    job = {key: value for key, value in tables["job"].items() if key not in _OF_ONE_START}
    tables["job"] = job | {"run_name": run_name(config.job)}
    lines: list[str] = []
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{toml_key(key)} = {toml_like(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines[1:]) + "\n"


def help_text() -> str:
    """Every option with its type, default and docstring, by table."""
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
    """Docstring of every option that has one, by table and key; read from the schema's source."""
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
