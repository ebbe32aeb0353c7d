"""Imports the command-line tools of the repository, which are not part of the package."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_program(name: str) -> ModuleType:
    """Returns a file such as scripts/prepare_data.py as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
