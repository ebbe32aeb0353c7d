"""Benchmarks and scripts run from a clone, where the package is not installed: benchmarks/golden.py and the others."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if "__main__" in path.read_text()
)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_the_clone_is_on_the_path_before_the_package_is_imported(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("sys.path.insert(0, str("):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.split(".")[0] not in ("torchtitan_clone", "benchmarks"), ast.unparse(node)
