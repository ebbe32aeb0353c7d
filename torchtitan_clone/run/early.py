"""Checks that need no torch, whose import takes seconds: the tables of a configuration, and what they name.

Names are read from the source of the dicts that hold them. Those that a program adds to a dict exist where it has
imported torch, and are left to later checks, as are all names where modules of job.imports may add to them.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.checks import (
    find_table_errors,
    find_unknown_decay,
    find_unknown_flavor,
    find_unknown_model,
    find_unknown_optimizers,
    find_unknown_schedule,
)
from torchtitan_clone.config.schema_training import FROM_FOLDER, Model

_PACKAGE = Path(__file__).parents[1]


class Family(NamedTuple):
    """What the source of a family of models states of it."""

    flavors: list[str]
    related: tuple[str, ...]


def check_without_torch(config: Config, *, problems: Sequence[str] = ()) -> None:
    """ConfigError with `problems` and all that is wrong on every device; does nothing where torch is imported."""
    if "torch" in sys.modules:
        return
    names = [] if config.job.imports else _find_unknown_names(config)
    if errors := [*problems, *names, *find_table_errors(config)]:
        raise ConfigError(errors)


def _find_unknown_names(config: Config) -> list[str]:
    return [
        *_find_model_errors(config.model),
        *find_unknown_optimizers(config.optimizer, known=keys_of("OPTIMIZERS", file="optim/optimizers.py")),
        *find_unknown_decay(config.lr_scheduler, known=keys_of("SCHEDULES", file="optim/schedule.py")),
        *find_unknown_schedule(config.parallelism, known=keys_of("SCHEDULES", file="parallel/stages.py")),
    ]


def _find_model_errors(model: Model) -> Iterator[str]:
    known = read_families()
    if model.name == FROM_FOLDER:
        return
    yield from find_unknown_model(model, known=known)
    if family := known.get(model.name):
        related = [flavor for name in family.related for flavor in known[name].flavors]
        yield from find_unknown_flavor(model, family=model.name, known=list(dict.fromkeys(family.flavors + related)))


@cache
def read_families() -> dict[str, Family]:
    """Returns the families of models by their names, as the calls of ModelSpec in models/*/__init__.py state them."""
    families: dict[str, Family] = {}
    for file in sorted(_PACKAGE.glob("models/*/__init__.py")):
        calls = [node for node in ast.walk(_parse(file)) if isinstance(node, ast.Call)]
        for call in calls:
            options = {keyword.arg: keyword.value for keyword in call.keywords}
            if isinstance(call.func, ast.Name) and call.func.id == "ModelSpec":
                related = ast.literal_eval(options["related"]) if "related" in options else ()
                flavors = keys_of(ast.unparse(options["flavors"]), file=str(file))
                families[ast.literal_eval(options["name"])] = Family(flavors, related)
    return families


def keys_of(name: str, *, file: str) -> list[str]:
    """Returns the keys of a dict that a file of the package assigns to a name."""
    assigned = [node for node in _parse(_PACKAGE / file).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    for node in assigned:
        (target,) = node.targets if isinstance(node, ast.Assign) else [node.target]
        if ast.unparse(target) == name and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise KeyError(f"{name} in {file}")


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
