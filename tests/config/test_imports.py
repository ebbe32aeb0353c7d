"""Modules of job.imports: what fails in them is one error with the user's own file and line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.imports import import_modules

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = undefined\n", "{file}:2: NameError: name 'undefined' is not defined"),
        ("x = 1\nif x\n", "{file}:2: SyntaxError: expected ':' ({name}.py, line 2)"),
        ("import json\n\njson.loads('[')\n", "{file}:3: JSONDecodeError: Expecting value: line 1 column 2 (char 1)"),
        ("import nobody_has_it\n", "{file}:1: ModuleNotFoundError: No module named 'nobody_has_it'"),
        ("raise SystemExit\n", "{file}:1: SystemExit"),
        ("from torchtitan_clone.optim.plain import register_optimizer\nregister_optimizer('A', print, args=int)\n",
         "{file}:2: ConfigError: optimizer \"A\": args = <class 'int'> must be a dataclass of options"),
    ],
)  # fmt: skip
def test_a_failure_names_the_line_of_the_user(tmp_path, monkeypatch, request, text, message):
    name = f"module_of_test_{abs(hash(request.node.callspec.id))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_modules([name])
    assert str(caught.value) == f'job.imports, "{name}": {message.format(file=tmp_path / f"{name}.py", name=name)}'


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError) as caught:
        import_modules(["json", "my_package.parts"])
    assert str(caught.value) == (
        'job.imports, "my_package.parts": there is no module my_package: the current folder, the folders in PYTHONPATH '
        "and the installed packages have none"
    )


def start(*argv: str, cwd: Path) -> tuple[int, str, bool]:
    """Returns the exit code of a start in a folder, its error output, and whether it has imported torch."""
    command = [sys.executable, "-X", "importtime", "-m", "torchtitan_clone.train", *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    lines = answer.stderr.splitlines()
    has_torch = any(line.endswith("| torch") for line in lines)
    return answer.returncode, "\n".join(line for line in lines if not line.startswith("import time:")), has_torch


def test_a_start_answers_before_it_imports_torch(tmp_path):
    (tmp_path / "mine.py").write_text("\nraise ValueError('an own rule')\n")
    code, text, has_torch = start('--job.imports=["mine"]', "--model.name=mine", cwd=tmp_path)
    assert (code, text, has_torch) == (2, 'error: job.imports, "mine": mine.py:2: ValueError: an own rule', False)
    code, text, has_torch = start('--job.imports=["mine.py", "other-parts"]', cwd=tmp_path)
    assert (code, has_torch, text.count("must be the name of a module as in an import")) == (2, False, 2)
