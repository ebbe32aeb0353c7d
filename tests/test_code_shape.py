"""Rules of the package's shape, read from its source: who may import whom, nothing dead, nothing undocumented."""

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import torchtitan_clone
from torchtitan_clone import doors
from torchtitan_clone.config import Config, load_config
from torchtitan_clone.config.reader import TABLES
from torchtitan_clone.config.render import option_docs

PACKAGE = Path(torchtitan_clone.__file__).parent
REPOSITORY = PACKAGE.parent
TRAIN_CONFIGS = sorted((REPOSITORY / "train_configs").glob("**/*.toml"))

LAYERS = [
    {"documents", "files", "network", "torch_compat", "doors"},
    {"config", "cache_folders", "compiler_guard"},
    {"comm", "storage"},
    {"ops", "observe"},
    {"replicas", "interfaces"},
    {"models", "data", "optim", "parallel", "checkpoint"},
    {"hub"},
    {"run"},
    {"trainer"},
    {"train", "launch"},
]
"""Packages from the lowest layer up; a package imports only from layers below its own."""

CALLED_BY_USERS = ["commands", "api", "__main__"]
"""Above the packages behind doors, from the lowest up."""

MOST_LINES = {"trainer": 350, "script": 80, "class": 350}
FUNCTION_LINES = {"median": 10, "90 %": 40, "longest": 80}
FUNCTION_LEVEL_CIRCLES: dict[str, str] = {}
"""Imports inside functions that close a circle of files, as "importer -> imported", each with the reason."""

UNPICKLING = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "Unpickler",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
"""Modules and functions that unpickle."""
MAY_UNPICKLE = {
    "torchtitan_clone.network": "serves stores at one address",
    "torchtitan_clone.data.encoder": "reads the pipe of a process that it started itself",
}

READ_BEFORE_A_CONFIG_EXISTS = {"job.extends"}
"""Read from what the user wrote, while the Config is still being put together."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Returns the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def sources() -> dict[str, ast.Module]:
    """Syntax tree of every module, by dotted name."""
    files = {path.relative_to(REPOSITORY).with_suffix(""): path for path in PACKAGE.glob("**/*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): tree_of(path) for name, path in files.items()}


def package_of(module: str) -> str:
    """Returns the package or top-level module that a module belongs to, "" for the package itself.

    A family's format on the Hugging Face hub belongs to `hub`: it is imported only where weights of the hub are.
    """
    if re.match(r"torchtitan_clone\.models\.\w+\.hf\b", module):
        return "hub"
    return [*module.split("."), ""][1]


def layer(module: str) -> int:
    """Index into LAYERS, above all of them for the packages behind doors; a new package must be entered there."""
    if package_of(module) in doors.DOORS:
        return len(LAYERS)
    if package_of(module) in CALLED_BY_USERS:
        return len(LAYERS) + 1 + CALLED_BY_USERS.index(package_of(module))
    found = [index for index, packages in enumerate(LAYERS) if package_of(module) in packages]
    assert found, f"{module}: belongs to no layer; enter it in LAYERS"
    return found[0]


def imports(module: str) -> Iterator[str]:
    """Dotted names that a module imports, inside functions too; `from a import b` gives a.b."""
    return imported_names(ast.walk(sources()[module]))


def imported_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that these statements import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def listed(findings: list[str]) -> str:
    """Returns one finding a line; pytest would show only the first of a list."""
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


def test_doors_lead_to_packages_that_start_with_their_nouns() -> None:
    for name, module in doors.DOORS.items():
        assert package_of(module) == name
        text = ast.get_docstring(sources()[f"torchtitan_clone.{name}"]) or ""
        assert len(text.splitlines()) > 3, f"torchtitan_clone/{name}/__init__.py defines no nouns"


PROCESSORS = re.compile(r"(?<!config\.)cpp|avx|amx|xeon|epyc", re.IGNORECASE)  # torch has options in config.cpp


def test_the_core_names_no_processor() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.glob("**/*.py"))
        if path.relative_to(PACKAGE).parts[0] not in doors.DOORS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PROCESSORS.search(line) and "Source:" not in line
    ]
    assert not wrong, listed(wrong)


def test_model_files_do_not_use_torch_distributed() -> None:
    wrong = [
        f"{module} uses torch.distributed"
        for module in sources()
        if package_of(module) == "models" and module != "torchtitan_clone.models.plan"
        if any(name.startswith("torch.distributed") for name in imports(module))
        or any(ast.unparse(node) == "torch.distributed" for node in attributes(sources()[module]))
    ]
    assert not wrong, listed(wrong)


def test_nothing_that_others_can_write_is_unpickled() -> None:
    """Unpickling executes code: neither collectives nor files may do it; and stores listen at one address only."""
    wrong = [f"{module} imports {name}" for module in sources() for name in imports(module) if name in UNPICKLING]
    for module, tree in sources().items():
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = [node for node in called if {tail_name(node), ast.unparse(node)} & UNPICKLING]
        wrong += [f"{module} calls {ast.unparse(node)} in line {node.lineno}" for node in found]
        passed = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and is_true(node.value)]
        wrong += [f"{module} passes {node.arg}=True" for node in passed if node.arg in ("allow_pickle", "is_master")]
    unexplained = [text for text in wrong if text.split()[0] not in MAY_UNPICKLE]
    assert not unexplained, listed(unexplained)


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_no_model_folder_imports_another() -> None:
    families = {path.name for path in (PACKAGE / "models").iterdir() if (path / "__init__.py").exists()}
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        for name in imports(module)
        if module.startswith("torchtitan_clone.models.") and module.split(".")[2:3] != name.split(".")[2:3]
        if name.startswith("torchtitan_clone.models.") and name.split(".")[2] in families
        if module.split(".")[2:3] and module.split(".")[2] in families
    ]
    assert not wrong, listed(wrong)


def module_graph(*, at_module_level: bool) -> dict[str, set[str]]:
    """Modules of this package that each module imports; without `at_module_level` also those inside functions."""
    return {
        module: {
            target
            for name in (imported_names(runtime_statements(tree)) if at_module_level else imports(module))
            if (target := name if name in sources() else name.rpartition(".")[0]) in sources() and target != module
        }
        for module, tree in sources().items()
    }


def runtime_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the file is imported; those under TYPE_CHECKING do not."""
    for node in tree.body:
        if isinstance(node, ast.Try):
            yield from node.body
        elif isinstance(node, ast.If):
            yield from node.body if ast.unparse(node.test) != "TYPE_CHECKING" else node.orelse
        else:
            yield node


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Returns each import that lies on a circle of files."""
    return [f"{a} -> {b}" for a in sorted(graph) for b in sorted(graph[a]) if a in reachable(graph, b)]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns all modules that `start` imports, directly or through others."""
    found: set[str] = set()
    left = [start]
    while left:
        for module in graph[left.pop()] - found:
            found.add(module)
            left.append(module)
    return found


def test_files_do_not_import_in_a_circle() -> None:
    found = circles(module_graph(at_module_level=True))
    assert not found, listed(found)


def test_imports_inside_functions_close_no_circle() -> None:
    found = circles(module_graph(at_module_level=False))
    unexplained = [edge for edge in found if edge not in FUNCTION_LEVEL_CIRCLES]
    assert not unexplained, listed(unexplained)
    assert not set(FUNCTION_LEVEL_CIRCLES) - set(found), "an exception that is no longer needed"


def test_the_package_imports_neither_tests_nor_benchmarks() -> None:
    others = ("tests", "benchmarks", "scripts")
    wrong = [f"{module} imports {name}" for module in sources() for name in imports(module) if name.startswith(others)]
    assert not wrong, listed(wrong)


def test_tests_assign_to_nothing_of_this_package() -> None:
    """What a test needs is injected through constructors or tests/support, never patched."""
    wrong = []
    for path in [*REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("benchmarks/*.py")]:
        tree = tree_of(path)
        names = {name.rpartition(".")[2] for name in imported_names(ast.walk(tree)) if "torchtitan_clone." in name}
        wrong += [
            f"{path.relative_to(REPOSITORY)}:{node.lineno} assigns to {ast.unparse(target)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in flat_targets(node.targets)
            if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in names
        ]
    assert not wrong, listed(wrong)


def flat_targets(targets: list[ast.expr]) -> Iterator[ast.expr]:
    """Returns the targets of an assignment, those of a tuple one by one."""
    for target in targets:
        if isinstance(target, ast.Tuple):
            yield from flat_targets(target.elts)
        else:
            yield target


def test_every_option_has_a_docstring() -> None:
    documented = option_docs()
    silent = [f"{table}.{key}" for table in TABLES for key in TABLES[table] if key not in documented[table]]
    assert not silent, listed(silent)


def test_every_option_is_read() -> None:
    """Beyond being declared and checked: some code does something with it.

    An option counts as read where `x.key` stands and x is the table itself (`config.training`), a name annotated with
    the section's class, or a name that such a value was assigned to in the same file.
    """
    trees = [
        tree
        for module, tree in sources().items()
        if module.split(".")[-1] not in ("schema", "schema_cluster", "schema_training", "checks")
    ]
    read = READ_BEFORE_A_CONFIG_EXISTS.union(*(options_read(tree) for tree in trees))
    declared = {f"{table}.{key}" for table in TABLES for key in TABLES[table]}
    unread = sorted(declared - read)
    assert not unread, listed(unread)


def options_read(tree: ast.Module) -> set[str]:
    """Dotted options of which one file reads the attribute."""
    nodes = list(ast.walk(tree))
    accessed = [(tail_name(node.value), node.attr) for node in nodes if isinstance(node, ast.Attribute)]
    found: set[str] = set()
    for table, section in (vars(Config())).items():
        names = names_of(nodes, table=table, section=type(section).__name__)
        found |= {f"{table}.{attribute}" for name, attribute in accessed if name in names}
    return found & {f"{table}.{key}" for table in TABLES for key in TABLES[table]}


def names_of(nodes: list[ast.AST], *, table: str, section: str) -> set[str]:
    """Names by which a file calls one table of the configuration."""
    names = {table}
    for node in nodes:
        match node:
            case ast.arg(arg=name, annotation=ast.Name(id=annotation)) if annotation == section:
                names.add(name)
            case ast.AnnAssign(target=target, annotation=ast.Name(id=annotation)) if annotation == section:
                names.add(tail_name(target))
            case _:
                pass
    for node in nodes:
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


def attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Every `x.y` inside a node."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def tail_name(node: ast.expr) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_train_configs_restate_no_default(path: Path) -> None:
    load_config([f"--job.config_file={path}"])
    tables = tomllib.loads(path.read_text())
    base = tables.get("job", {}).pop("extends", None)
    below = load_config([f"--job.config_file={path.parent / base}"] if base else [])
    restated = [
        f"{table}.{key}"
        for table, values in tables.items()
        for key, value in values.items()
        if value == getattr(getattr(below, table), key)
    ]
    assert not restated, listed(restated)


def function_lines() -> dict[str, int]:
    """Lines of every function from def to end, without its docstring."""
    lines: dict[str, int] = {}
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
                lines[f"{module}.{node.name}:{node.lineno}"] = (node.end_lineno or node.lineno) - first + 1
    return lines


def test_functions_are_short() -> None:
    lines = function_lines()
    assert {name: count for name, count in lines.items() if count > FUNCTION_LINES["longest"]} == {}
    assert statistics.median(lines.values()) <= FUNCTION_LINES["median"]
    assert statistics.quantiles(lines.values(), n=10)[-1] <= FUNCTION_LINES["90 %"]


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_trainer_is_short_and_does_not_know_pipelines() -> None:
    text = (PACKAGE / "trainer.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES["trainer"]
    assert len(re.findall(r"\bpp\b", text)) <= 1


def test_scripts_are_thin() -> None:
    lines = {path.name: line_count(path) for path in REPOSITORY.glob("scripts/**/*.py")}
    assert {name: count for name, count in lines.items() if count > MOST_LINES["script"]} == {}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class of the package by dotted name."""
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{module.removeprefix('torchtitan_clone.')}.{node.name}", node


def test_classes_are_small() -> None:
    lines = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in classes()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES["class"]} == {}


def test_the_configuration_loads_without_torch() -> None:
    """A wrong option is reported at once, not after the seconds that importing torch takes."""
    code = "import sys, torchtitan_clone.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
