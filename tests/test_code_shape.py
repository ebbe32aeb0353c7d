"""Rules of the package's shape, read from its source: who may import whom, nothing dead, nothing undocumented."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomli

import torchtitan_clone
from torchtitan_clone.config import Config, load_config
from torchtitan_clone.config.render import option_docs
from torchtitan_clone.config.sources import TABLES

PACKAGE = Path(torchtitan_clone.__file__).parent
REPOSITORY = PACKAGE.parent
TRAIN_CONFIGS = sorted((REPOSITORY / "train_configs").glob("**/*.toml"))

LAYERS = [
    {"files", "torch_compat"},
    {"config", "ops"},
    {"observe"},
    {"models", "data", "optim", "parallel", "checkpoint", "fault_tolerance"},
    {"run"},
    {"trainer"},
    {"train", "launch"},
    {"testing"},
]
"""Packages from the lowest layer up; a package imports only from layers below its own."""

LONGEST_FUNCTION = 90
LONGEST_MEDIAN = 15

READ_BEFORE_A_CONFIG_EXISTS = {"job.extends"}
"""Read from what the user wrote, while the Config is still being put together."""


@cache
def sources() -> dict[str, ast.Module]:
    """Syntax tree of every module, by dotted name."""
    files = {path.relative_to(REPOSITORY).with_suffix(""): path for path in PACKAGE.glob("**/*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in files.items()}


def package_of(module: str) -> str:
    """Returns the package or top-level module that a module belongs to, "" for the package itself."""
    return [*module.split("."), ""][1]


def layer(module: str) -> int:
    """Index into LAYERS; a new package must be entered there."""
    found = [index for index, packages in enumerate(LAYERS) if package_of(module) in packages]
    assert found, f"{module}: belongs to no layer; enter it in LAYERS"
    return found[0]


def imports(module: str) -> Iterator[str]:
    """Dotted names that a module imports, inside functions too; `from a import b` gives a.b."""
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: line {node.lineno} imports relatively; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def listed(findings: list[str]) -> str:
    """Findings one below the other; pytest would show the first of a list only."""
    return "\n".join(["", *findings])


def test_a_package_imports_only_from_layers_below() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in imports(module)
        if name.startswith("torchtitan_clone.")
        and package_of(name) != package_of(module)
        and package_of(name) != "__version__"
        and (package_of(module) == "" or layer(name) >= layer(module))
    ]
    assert not wrong, listed(wrong)


def test_model_files_know_nothing_of_distribution() -> None:
    wrong = [
        f"{module} uses torch.distributed"
        for module in sources()
        if package_of(module) == "models" and not module.endswith(".plan")
        if any(name.startswith("torch.distributed") for name in imports(module))
        or any(ast.unparse(node) == "torch.distributed" for node in attributes(sources()[module]))
    ]
    assert not wrong, listed(wrong)


def test_no_model_folder_imports_another() -> None:
    families = {path.name for path in (PACKAGE / "models").iterdir() if (path / "model.py").exists()}
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in imports(module)
        if package_of(module) == "models" and module.split(".")[2:3] != name.split(".")[2:3]
        if name.startswith("torchtitan_clone.models.") and name.split(".")[2] in families
        if module.split(".")[2:3] and module.split(".")[2] in families
    ]
    assert not wrong, listed(wrong)


def test_every_option_has_a_docstring() -> None:
    documented = option_docs()
    silent = [f"{table}.{key}" for table in TABLES for key in TABLES[table] if key not in documented[table]]
    assert not silent, listed(silent)


def test_every_option_is_read() -> None:
    """Beyond being declared and checked: some code does something with it.

    An option counts as read where `x.key` stands and x is the table itself (`config.training`), a name annotated with
    the section's class, or a name that such a value was assigned to in the same file.
    """
    trees = [tree for module, tree in sources().items() if module.split(".")[-1] not in ("schema", "checks")]
    read = READ_BEFORE_A_CONFIG_EXISTS.union(*(options_read(tree) for tree in trees))
    declared = {f"{table}.{key}" for table in TABLES for key in TABLES[table]}
    unread = sorted(declared - read)
    assert not unread, listed(unread)


def options_read(tree: ast.Module) -> set[str]:
    """Dotted options of which one file reads the attribute."""
    accessed = [(tail_name(node.value), node.attr) for node in attributes(tree)]
    found: set[str] = set()
    for table, section in (vars(Config())).items():
        names = names_of(tree, table=table, section=type(section).__name__)
        found |= {f"{table}.{attribute}" for name, attribute in accessed if name in names}
    return found & {f"{table}.{key}" for table in TABLES for key in TABLES[table]}


def names_of(tree: ast.Module, *, table: str, section: str) -> set[str]:
    """Names by which a file calls one table of the configuration."""
    names = {table}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.Name(id=annotation)) if annotation == section:
                names.add(name)
            case ast.AnnAssign(target=target, annotation=ast.Name(id=annotation)) if annotation == section:
                names.add(tail_name(target))
            case _:
                pass
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names.update(tail_name(target) for target, value in assigned(node) if tail_name(value) in names)
    return names - {""}


def assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of target and value; `a, b = x, y` gives two."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def attributes(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Every `x.y` of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def tail_name(node: ast.expr) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_a_train_config_states_only_what_differs(path: Path) -> None:
    load_config([f"--job.config_file={path}"])
    tables = tomli.loads(path.read_text())
    base = tables.get("job", {}).pop("extends", None)
    below = load_config([f"--job.config_file={path.parent / base}"] if base else [])
    restated = [
        f"{table}.{key}"
        for table, values in tables.items()
        for key, value in values.items()
        if value == getattr(getattr(below, table), key)
    ]
    assert not restated, listed(restated)


def test_what_is_public_says_what_it_is_for() -> None:
    silent = [
        f"{module}.{node.name}"
        for module, tree in sources().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    silent += [module for module, tree in sources().items() if not ast.get_docstring(tree)]
    assert not silent, listed(silent)


def function_lines() -> dict[str, int]:
    """Lines of every function from def to end, its docstring left out."""
    lines: dict[str, int] = {}
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
                lines[f"{module}.{node.name}:{node.lineno}"] = (node.end_lineno or node.lineno) - first + 1
    return lines


def test_functions_are_short() -> None:
    lines = function_lines()
    assert {name: count for name, count in lines.items() if count > LONGEST_FUNCTION} == {}
    assert statistics.median(lines.values()) <= LONGEST_MEDIAN


def test_the_configuration_loads_without_torch() -> None:
    """A wrong option is told at once, not after the seconds that torch takes to import."""
    code = "import sys, torchtitan_clone.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
