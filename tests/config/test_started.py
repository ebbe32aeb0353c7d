"""Messages name the scripts of a checkout, or the commands of an installed package."""

import ast
import re
from pathlib import Path

import pytest

from torchtitan_clone.commands import MODULES, SUMMARIES
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.started import (
    CHECKOUT,
    SCRIPTS,
    VARIABLE,
    as_started,
    find_config,
    reinstall,
    shipped_configs,
    uses_checkout,
)

COMMANDS = CHECKOUT / "torchtitan_clone" / "commands"
PAGE = CHECKOUT / "docs" / "python.md"
CALL = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[{}]))  # runs from a clone without being installed

from torchtitan_clone.commands import run_script

if __name__ == "__main__":
    sys.exit(run_script(__file__))
"""
TEXT = (
    "start scripts/lighthouse.py; python scripts/convert_to_hf.py A B; ./run_train.sh --a=b; my_scripts/plan.py; "
    "torchrun --nproc_per_node=4 scripts/store_predictions.py --k=1"
)


def test_scripts_are_those_of_the_checkout_and_of_the_commands() -> None:
    assert [script for script in SCRIPTS.values() if not (CHECKOUT / script).exists()] == []
    assert SCRIPTS.keys() == SUMMARIES.keys() == MODULES.keys()
    assert [name for name in MODULES.values() if not (COMMANDS / f"{name}.py").exists()] == []
    rows = [f"| `{name}` | `{script}` |" for name, script in SCRIPTS.items()]
    assert sorted(rows) == sorted(re.findall(r"^\| `.*` \| `.*\.(?:py|sh)` \|$", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - {"train"}))
def test_a_script_does_nothing_but_call_its_command(name: str) -> None:
    title, _, code = (CHECKOUT / SCRIPTS[name]).read_text().partition("\n")
    assert title == f'"""`torchtitan_clone {name}` of this checkout."""'
    assert code == CALL.format(SCRIPTS[name].count("/"))


def test_a_text_names_what_the_user_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert uses_checkout()
    assert as_started(TEXT) == TEXT
    assert "./run_train.sh" in reinstall()
    monkeypatch.setenv(VARIABLE, "1")
    assert as_started(TEXT) == (
        "start torchtitan_clone lighthouse; torchtitan_clone convert to_hf A B; torchtitan_clone train --a=b; "
        "my_scripts/plan.py; torchrun --nproc_per_node=4 -m torchtitan_clone predict --k=1"
    )
    assert "run_train" not in reinstall()


def test_no_message_names_a_script_that_may_not_be_there() -> None:
    """Texts with the name of a script are arguments of as_started(), or docstrings, which --help passes to it."""
    found: list[str] = []
    for path in COMMANDS.parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        passed = [each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func) == "as_started"]
        docstrings = [each for each in nodes if isinstance(each, ast.Expr)]
        allowed = {part for each in (*passed, *docstrings) for part in ast.walk(each)}
        texts = [each for each in nodes if isinstance(each, ast.Constant) and each not in allowed]
        named = [each for each in texts if any(script in str(each.value) for script in SCRIPTS.values())]
        found += [f"{path.relative_to(COMMANDS.parent)}:{each.lineno}" for each in named]
    assert {each.partition(":")[0] for each in found} == {"config/started.py", "config/render.py"}, found


@pytest.mark.parametrize("name", MODULES.values())
def test_help_of_a_command_names_no_script_where_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    text = as_started(ast.get_docstring(ast.parse((COMMANDS / f"{name}.py").read_text())) or "")
    assert text
    assert "scripts/" not in text
    assert name == "train" or "torchtitan_clone " in text


def test_shipped_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "llama3_8b" in shipped_configs()
    assert load_config(["--job.config_file=llama3_8b"]).model.flavor == "8B"
    (tmp_path / "mine.toml").write_text('[job]\nextends = "llama3_8b"\n[training]\nsteps = 7\n')
    config = load_config(["--job.config_file=mine.toml"])
    assert (config.model.flavor, config.training.steps) == ("8B", 7)
    Path("llama3_8b").write_text("[training]\nsteps = 3\n")  # a file of the user's comes first
    assert find_config("llama3_8b") == "llama3_8b"
    assert load_config(["--job.config_file=llama3_8b"]).training.steps == 3


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("llama3_8", "cannot read llama3_8: No such file or directory; did you mean llama3_8b?"),
        ("my.toml", "cannot read my.toml: No such file or directory"),
        ("../llama3_8b", "cannot read ../llama3_8b: No such file or directory"),
    ],
)
def test_a_file_that_is_missing_is_one_error(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_config([f"--job.config_file={name}"])
    assert str(raised.value).startswith(f"command line: {complaint}")
