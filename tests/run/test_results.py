"""What the last lines of a run name works as it is typed."""

import os
import re
import shlex
import subprocess
import sysconfig

import pytest

from tests.support.runs import options, train
from torchtitan_clone.config import load_config
from torchtitan_clone.run import preflight
from torchtitan_clone.run.describe import describe_extension, describe_results


def test_the_commands_of_a_complete_run_work_without_its_environment(corpus, tmp_path):
    """As after run_train.sh, which uses .venv without activating it."""
    folder = tmp_path / "two words"
    argv = options(corpus, folder, training__steps=1, metrics__enable_tensorboard=True)
    own = {"PATH": os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if not is_own(each))}
    code, text = train(argv, log_folder=tmp_path, env=own)
    assert code == 0, text
    end = text.partition("training is complete")[2]
    commands = dict(re.findall(r"\b(TensorBoard|report|export|generate) +(.*)", end))
    assert f"{folder / 'run' / 'metrics.jsonl'}" in end
    assert f"{folder / 'run' / 'checkpoint' / 'step-1'}" in end
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    for name in ("report", "generate", "export"):
        command = commands[name].replace("FOLDER", shlex.quote(str(tmp_path / "exported")))
        answer = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
    assert (folder / "run" / "report.html").stat().st_size > 2**22
    assert (tmp_path / "exported" / "config.json").exists()
    words = shlex.split(commands["TensorBoard"])
    assert words[1:] == ["-m", "tensorboard.main", "--logdir", str(folder / "run" / "tb")]
    subprocess.run([*words[:3], "--version"], env=environment, capture_output=True, check=True)


def test_a_step_that_only_a_store_has_is_named_there_with_the_command_that_copies_it(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=5, checkpoint__folder="s3://bucket/runs")
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    lines = dict(line.split(maxsplit=1) for line in describe_results(plan))
    assert lines["stored"] == "s3://bucket/runs/step-5"
    assert lines["copy"].endswith("checkpoint.py copy s3://bucket/runs FOLDER")
    assert lines.keys().isdisjoint({"checkpoint", "export", "generate"})
    (tmp_path / "run" / "checkpoint" / "step-5").mkdir(parents=True)
    lines = dict(line.split(maxsplit=1) for line in describe_results(plan))
    assert lines["checkpoint"] == str(tmp_path / "run" / "checkpoint" / "step-5")
    assert {"stored", "export", "generate"} <= lines.keys()
    assert "copy" not in lines


def is_own(folder):
    return folder == sysconfig.get_path("scripts") or os.path.exists(os.path.join(folder, "python"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--optimizer.lr=1e-3", "--lr_scheduler.decay_ratio=0.5"],
            "--training.steps=200: the learning rate would jump from 2.00e-05 to 1.00e-03, because the schedule ends "
            "with training.steps; add --lr_scheduler.total_steps=100 to keep the final rate",
        ),
        (["--lr_scheduler.total_steps=100"], "--training.steps=200"),
        (["--lr_scheduler.points=[[0, 1.0], [100, 0.0]]"], "--training.steps=200"),
        (["--lr_scheduler.min_lr_factor=1.0"], "--training.steps=200"),
    ],
)
def test_the_jump_of_the_learning_rate_is_named(argv, expected):
    config = load_config(["--training.steps=100", "--lr_scheduler.warmup_steps=10", *argv])
    assert describe_extension(config) == expected


def test_a_start_of_a_complete_run_names_the_jump(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=4)
    train(argv, log_folder=tmp_path)
    assert "--training.steps=8: the learning rate would jump from " in train(argv, log_folder=tmp_path)[1]
