"""What is wrong with a configuration shows before torch is imported, by names that are read from the source."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_clone.models import MODELS
from torchtitan_clone.optim import OPTIMIZERS, SCHEDULES
from torchtitan_clone.parallel import stages
from torchtitan_clone.run.early import keys_of, read_families

ROOT = Path(__file__).parents[2]


def test_names_in_the_source_are_those_of_the_dicts() -> None:
    found = read_families()
    assert {name: family.flavors for name, family in found.items()} == {
        name: list(spec.flavors) for name, spec in MODELS.items()
    }
    assert {name: family.related for name, family in found.items()} == {
        name: spec.related for name, spec in MODELS.items()
    }
    assert keys_of("OPTIMIZERS", file="optim/optimizers.py") == list(OPTIMIZERS)
    assert keys_of("SCHEDULES", file="optim/schedule.py") == list(SCHEDULES)
    assert keys_of("SCHEDULES", file="parallel/stages.py") == list(stages.SCHEDULES)


def start(*argv: str, module: str = "torchtitan_clone.train", cwd: Path) -> tuple[int, list[str], bool]:
    """Returns the exit code of a start, the lines of its error, and whether it has imported torch."""
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *argv],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = answer.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "torchtitan_clone.config" in imported
    return answer.returncode, [line for line in lines if not line.startswith("import time:")], "torch" in imported


def test_another_system_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "mac.py"
    program.write_text(
        "import sys\nfrom torchtitan_clone.train import exit_process\n"
        'sys.platform = "darwin"\nexit_process(sys.argv[1:])\n'
    )
    code, lines, has_torch = start("--training.steps=1", module="mac", cwd=tmp_path)
    assert (code, len(lines), has_torch) == (2, 1, False)
    assert lines[0].startswith("error: darwin is not supported: ")
    assert start("--help", module="mac", cwd=tmp_path)[0] == 0


@pytest.mark.parametrize(("file", "steps"), [(None, 120), ("mine.toml", 7), ("/dev/null", 10000)])
def test_a_start_without_a_file_has_that_of_run_train(
    tmp_path: Path, python: Path, file: str | None, steps: int
) -> None:
    (tmp_path / "mine.toml").write_text("[training]\nsteps = 7\n")
    argv = [f"--job.config_file={file}"] if file == "/dev/null" else []
    answer = subprocess.run(
        [python, "-m", "torchtitan_clone.train", *argv, "--dry-run", "--all", "--job.run_name=any"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CONFIG_FILE": file or ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"\nsteps = {steps}\n" in answer.stdout


FLAVOR = "error: model.flavor = "


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (
            ["--model.flavor=8b"],
            f'{FLAVOR}"8b": no such flavor of llama3 (did you mean "8B"?); known: debugmodel, 1B, ',
        ),
        (["--model.name=Llama3"], 'error: model.name = "Llama3": no such model (did you mean "llama3"?); known: '),
        (["--model.name=rwkv"], 'error: model.name = "rwkv": no such model; known: '),
        (
            ["--model.name=qwen3", "--model.flavor=30b-a3b"],
            f'{FLAVOR}"30b-a3b": no such flavor of qwen3 (did you mean "30B-A3B"?); known: ',
        ),
        (
            ["--optimizer.name=adamw"],
            'error: optimizer.name = "adamw": no such optimizer (did you mean "AdamW"?); known: ',
        ),
        (
            ['--optimizer.groups=[{pattern="*", name="ADAM"}]'],
            'error: optimizer.groups, pattern "*": name = "ADAM": no such optimizer (did you mean "Adam"?); known: ',
        ),
        (
            ["--lr_scheduler.decay_type=Cosine"],
            'error: lr_scheduler.decay_type = "Cosine": no such shape (did you mean "cosine"?); known: ',
        ),
        (
            ["--parallelism.pipeline_parallel_schedule=1f1b"],
            'error: parallelism.pipeline_parallel_schedule = "1f1b": no such schedule (did you mean "1F1B"?); known: ',
        ),
        (["--optimizer.lr=-3"], "error: optimizer.lr = -3.0: must be above 0 and at most 1e+30."),
    ],
)
def test_a_wrong_name_or_value_is_one_line_before_torch_is_imported(
    tmp_path: Path, argv: list[str], problem: str
) -> None:
    code, lines, has_torch = start(*argv, cwd=tmp_path)
    assert (code, len(lines), has_torch) == (2, 1, False)
    assert lines[0].startswith(problem)
    assert not [*tmp_path.iterdir()]


def test_all_that_shows_without_torch_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "titan.toml"
    file.write_text('[model]\nflavor = "8b"\n[optimizer]\nlr = -1\nearly_step_in_backward = true\n')
    code, lines, has_torch = start("--job.config_file=titan.toml", cwd=tmp_path)
    assert (code, has_torch) == (2, False)
    assert lines[0] == "error: 3 problems in the configuration:"
    assert lines[1].startswith("  - titan.toml:5: optimizer.early_step_in_backward = true: ")


def dry_run(*argv: str, module: str, python: Path, cwd: Path) -> tuple[int, list[str]]:
    """Returns the exit code of a dry run and the lines of its error; faster than start() where torch is needed."""
    command = [python, "-m", module, *argv, "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return answer.returncode, answer.stderr.splitlines()


def test_what_a_program_adds_is_known(tmp_path: Path, python: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "import sys\nfrom torchtitan_clone.models import MODELS\nfrom torchtitan_clone.train import exit_process\n"
        'MODELS["mine"] = MODELS["llama3"]\nexit_process(sys.argv[1:])\n'
    )
    assert dry_run("--model.name=mine", module="mine", python=python, cwd=tmp_path) == (0, [])
    code, (line,) = dry_run("--model.name=other", module="mine", python=python, cwd=tmp_path)
    assert code == 2
    assert line.startswith('error: model.name = "other": no such model; known: llama3, ')
    assert line.endswith(", mine")


def test_an_invalid_model_is_named_without_a_look_at_the_data(tmp_path: Path, python: Path) -> None:
    missing, module = "--training.dataset_path=nowhere", "torchtitan_clone.train"
    _, lines = dry_run("--model.args.n_layer=3", missing, module=module, python=python, cwd=tmp_path)
    assert lines == ["error: model.args.n_layer: unknown option; did you mean model.args.n_layers?"]
    _, (line,) = dry_run(missing, module=module, python=python, cwd=tmp_path)
    assert line.startswith('error: training.dataset_path = "nowhere": no such file')
