"""Doors to the packages that the core never imports: it finds each by name, and trains without it.

A *door* is a module of such a package with the functions that a Protocol of the core describes: `CPU.attend(...)` where
`CPU = doors.find("cpu")` is not None, and torch's own attention otherwise. It is closed where
its package is missing, or by an environment variable: `TORCHTITAN_CLONE_CPU=0`.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

DOORS = {
    "cpu": "torchtitan_clone.cpu.door",
    "planner": "torchtitan_clone.planner.door",
    "tools": "torchtitan_clone.tools.door",
    "torchft": "torchtitan_clone.torchft.door",
}
"""The module behind each door, which offers what a Protocol of the core describes."""


def find(name: str) -> ModuleType | None:
    """Returns the module behind a door; None if it is closed."""
    return import_module(DOORS[name]) if why_closed(name) is None else None


def why_closed(name: str) -> str | None:
    """Returns why a door is closed and how to open it; None if it is open."""
    variable = f"TORCHTITAN_CLONE_{name.upper()}"
    if os.environ.get(variable) == "0":
        return f"${variable} = 0 closes the package torchtitan_clone.{name}; unset it"
    if find_spec(DOORS[name].rpartition(".")[0]) is None:
        return f"the package torchtitan_clone.{name} is missing; install torchtitan_clone again"
    return None
