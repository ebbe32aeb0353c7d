"""Modules of the user that add models, datasets, optimizers and schedules to the dicts: job.imports."""

import sysconfig
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from torchtitan_clone.config.messages import ConfigError, shown

_PACKAGE = Path(__file__).parents[1]


def import_modules(names: Sequence[str]) -> None:
    """Imports modules as `python -m` finds them; ConfigError where one fails, with the user's own file and line."""
    for name in names:
        import_named(name)


def import_named(name: str) -> None:
    """Imports one module in the same way."""
    try:
        import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"job.imports, {shown(name)}: {_describe(error, module=name)}") from error


def _describe(error: BaseException, *, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.") and not _own_line(error):
        places = "the current folder, the folders in PYTHONPATH and the installed packages have none"
        return f"there is no module {error.name}: {places}"
    return describe_failure(error)


def describe_failure(error: BaseException) -> str:
    """Returns what failed in code of the user's, after the file and line there that it came from."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{_own_line(error)}{text}"


def _own_line(error: BaseException) -> str:
    """Returns "FILE:LINE: " of the innermost line that is neither Python's, nor a package's, nor of this one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}: "
    others = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(_PACKAGE), "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
