"""Attacks on the folder of a run: a second run, deletion while training, hostile files in it, storage without room.

Of torchtitan_clone/run/folder.py, torchtitan_clone/run/preflight.py, torchtitan_clone/observe/metrics.py,
torchtitan_clone/observe/goodput.py, torchtitan_clone/config/checks.py, torchtitan_clone/config/reader.py,
torchtitan_clone/parallel/stages.py and torchtitan_clone/checkpoint/save.py.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import Ranks, options, rows, train, wait_for_step
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.checks import find_config_errors
from torchtitan_clone.files import format_bytes
from torchtitan_clone.observe.goodput import resumed_ledger
from torchtitan_clone.observe.metrics import check_metrics_file
from torchtitan_clone.parallel.stages import read_schedule_file
from torchtitan_clone.run.folder import LOCK_FILE

ENDLESS = {"training__steps": 1_000_000, "checkpoint__interval": 1_000_000, "metrics__log_freq": 1}


def wait_until(condition, *, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.02)


def step_rows(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder) if "loss" in row]


def test_a_second_run_in_one_folder_is_refused_until_the_first_is_gone(corpus, tmp_path):
    argv = options(corpus, tmp_path, **ENDLESS)
    first = Ranks(argv, world_size=1, log_folder=tmp_path / "first")
    wait_for_step(tmp_path, 1)
    assert train([*argv, "--dry-run"], log_folder=tmp_path / "dry")[0] == 0
    code, output = train(argv, log_folder=tmp_path / "second")
    assert code == 2
    assert f"in use by process {first.pids[0]} on {os.uname().nodename}, since " in output
    assert "choose another job.run_name" in output
    os.kill(first.pids[0], signal.SIGKILL)
    steps = step_rows(tmp_path)
    assert steps == sorted(set(steps))
    shorter = options(corpus, tmp_path, training__steps=2)
    code, output = train(shorter, log_folder=tmp_path / "third")
    assert (code, "waiting up to" in output) == (0, False), output


HOLDER = """
import fcntl, json, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(json.dumps({"host": "elsewhere", "pid": 7, "started": "long ago"}))
file.flush()
print("locked", flush=True)
time.sleep(600)
"""


def test_the_lock_of_another_machine_is_waited_for(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLDER, tmp_path / "run" / LOCK_FILE]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    run = Ranks(options(corpus, tmp_path, training__steps=2), world_size=1, log_folder=tmp_path)
    wait_until(lambda: "waiting up to" in run.output)
    assert "is in use by process 7 on elsewhere, since long ago: waiting up to 120 s" in run.output
    holder.kill()
    holder.wait()
    assert run.wait()[0] == 0


def test_a_folder_deleted_while_training_is_recreated(corpus, tmp_path):
    argv = options(corpus, tmp_path, metrics__enable_tensorboard=True, **ENDLESS)
    run = Ranks(argv, world_size=1, log_folder=tmp_path / "log")
    wait_for_step(tmp_path, 3)
    before = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run").rename(tmp_path / "deleted")  # at once: a run recreates a folder while it is being deleted
    shutil.rmtree(tmp_path / "deleted")
    wait_until(lambda: len(step_rows(tmp_path)) >= 3)
    run.signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0
    assert output.count("was deleted while training") == 1
    steps = step_rows(tmp_path)
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert committed_steps(tmp_path / "run" / "checkpoint") == [steps[-1]]
    assert (tmp_path / "run" / "config.toml").read_text() == before
    assert list((tmp_path / "run" / "tb").iterdir())
    assert train(options(corpus, tmp_path, **ENDLESS | {"training__steps": steps[-1] + 1}), log_folder=tmp_path)[0] == 0


def test_a_run_whose_folder_another_run_has_taken_over_ends(corpus, tmp_path):
    argv = options(corpus, tmp_path, **ENDLESS)
    old = Ranks(argv, world_size=1, log_folder=tmp_path / "old")
    wait_for_step(tmp_path, 1)
    old.signal(signal.SIGSTOP)
    shutil.rmtree(tmp_path / "run")
    new = Ranks(argv, world_size=1, log_folder=tmp_path / "new")
    wait_for_step(tmp_path, 1)
    old.signal(signal.SIGCONT)
    code, output = old.wait()
    assert code == 1
    assert f"was deleted during training: the folder {tmp_path}/run is in use by process {new.pids[0]}" in output
    new.signal(signal.SIGTERM)
    assert new.wait()[0] == 0
    assert step_rows(tmp_path) == list(range(1, len(step_rows(tmp_path)) + 1))


ROW = {"step": 1, "loss": 5.0, "time": 1e9}
GOODPUT = {
    "step": 1,
    "time": 1e9,
    "event": "goodput",
    "complete": False,
    "starts": 1,
    "steps_thrown_away": 0,
    **{f"{name}_seconds": 1.0 for name in ("progress", "start_up", "saving", "healing", "waiting", "thrown_away")},
}
HOSTILE_ROWS = {
    "nested": "[" * 200_000,
    "no table": "[1]",
    "text for a step": json.dumps(ROW | {"step": "1"}),
    "huge step": json.dumps(ROW | {"step": 2**70}),
    "long number": f'{{"step": {"9" * 5000}, "time": 0}}',
    "infinite time": '{"step": 1, "time": 1e400}',
    "text for seconds": json.dumps(GOODPUT | {"saving_seconds": "1"}),
    "infinite seconds": json.dumps(GOODPUT).replace("1.0", "1e400"),
    "no seconds": json.dumps({"step": 1, "time": 0, "event": "goodput"}),
    "list for an event": json.dumps(ROW | {"event": [["goodput"]]}),
}


def test_hostile_rows_are_no_rows(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for name, line in HOSTILE_ROWS.items():
        file.write_text(f"{json.dumps(GOODPUT)}\n{json.dumps(ROW | {'step': 2})}\n{line}\n\xff\n")
        row = resumed_ledger(file, resume_step=2, lost=0, started=1e9).row()
        assert (row["starts"], row["saving_seconds"]) == (2, 1.0), name


def test_rows_after_hostile_ones_are_written(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    lines = [*HOSTILE_ROWS.values(), json.dumps(ROW | {"step": 4})]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    code, output = train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)
    assert (code, "Traceback" in output) == (0, False), output
    assert step_rows(tmp_path) == [1, 2]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link", "sparse"])
def test_metrics_that_are_no_regular_file_are_refused(tmp_path, kind):
    file = tmp_path / "metrics.jsonl"
    make_irregular(file, kind=kind)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl.*move it to another folder"):
        check_metrics_file(tmp_path)


def make_irregular(path: Path, *, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.with_name("target").touch()
        path.symlink_to("target")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["metrics.jsonl", LOCK_FILE])
def test_a_pipe_in_the_folder_is_refused_before_the_start(corpus, tmp_path, name):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    code, output = train(options(corpus, tmp_path), log_folder=tmp_path)
    assert code == 2
    assert output.count("error: ") == 1
    assert f"{name}: must be a regular file" in output


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse"])
def test_a_configuration_that_is_no_regular_file_is_refused(tmp_path, kind):
    file = tmp_path / "run.toml"
    make_irregular(file, kind=kind)
    base = tmp_path / "base.toml"
    base.write_text('[job]\nextends = "run.toml"\n')
    for path in (file, base):
        with pytest.raises(ConfigError, match=r"cannot read .*run\.toml"):
            load_config([f"--job.config_file={path}"])
    with pytest.raises(ValueError, match=r"run\.toml: (must be a regular file|has .* bytes)"):
        read_schedule_file(str(file))
    (tmp_path / "good.toml").write_text("[training]\nsteps = 3\n")
    (tmp_path / "link.toml").symlink_to("good.toml")
    assert load_config([f"--job.config_file={tmp_path / 'link.toml'}"]).training.steps == 3


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", ".", "/", "x" * 129, "two\nlines", "\x1b[2J"])
def test_a_run_name_that_leaves_its_folder_is_refused(name):
    (problem,) = find_config_errors(load_config([f"--job.run_name={name}"]), device_type="cpu")
    assert problem.startswith("job.run_name = ")
    assert "one path component of at most 128 printable characters" in str(ConfigError(problem))
    assert str(ConfigError(problem)).isprintable()


def test_ordinary_run_names_are_accepted():
    for name in ("run", "2026-11-21 lr=3e-4", "größer", "x" * 128, ".hidden"):
        config = load_config([f"--job.run_name={name}"])
        assert find_config_errors(config, device_type="cpu") == []


def test_an_evil_run_name_writes_nothing(corpus, tmp_path):
    argv = options(corpus, tmp_path / "a" / "b", job__run_name="../../evil")
    code, output = train(argv, log_folder=tmp_path / "log")
    assert (code, output.count("error: ")) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


SECRETS = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS"]
HARMLESS = ["TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "MASTER_ADDR", "OMP_NUM_THREADS", "PYTHON"]


@pytest.mark.parametrize("name", [*SECRETS, *(name.lower() for name in SECRETS)])
@pytest.mark.parametrize(
    "option", ["environment.{}=hunter2", "setup=['export {}=hunter2']", "container=run {}=hunter2"]
)
def test_secrets_are_refused_where_they_would_be_stored(name, option):
    config = load_config([f"--slurm.{option.format(name)}"])
    (problem,) = find_config_errors(config, device_type="cpu")
    assert f"{name} looks like a secret" in problem
    assert f"export {name} before you submit" in problem
    assert "hunter2" not in problem


def test_other_variables_are_stored():
    config = load_config([*(f"--slurm.environment.{name}=1" for name in HARMLESS)])
    assert find_config_errors(config, device_type="cpu") == []
    commands = "--slurm.setup=['export HF_TOKEN=$(cat ~/.token)', 'module load cuda']"
    assert find_config_errors(load_config([commands]), device_type="cpu") == []


@pytest.mark.parametrize("kind", ["file", "dangling link", "unwritable"])
def test_an_unwritable_checkpoint_folder_is_found_before_the_start(corpus, tmp_path, kind):
    (tmp_path / "run").mkdir()
    folder = tmp_path / "run" / "checkpoint"
    if kind == "file":
        folder.write_text("")
    else:  # no process, not even one of root, can create a file in /proc
        folder.symlink_to("/proc/self/fdinfo" if kind == "unwritable" else "/proc/no/such")
    code, output = train(options(corpus, tmp_path), log_folder=tmp_path)
    assert (code, output.count("error: ")) == (2, 1), output
    assert f'checkpoint.folder: nothing can be written to "{folder}"' in output
    loading = options(corpus, tmp_path, training__steps=2, checkpoint__enable=False)
    code, output = train(loading, log_folder=tmp_path)
    assert code == 0, output


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_the_last_message_names_the_newest_checkpoint(corpus, tmp_path, mode):
    """A limit on the size of files stands for the full disk; metrics are shorter than it."""
    changes = {"training__steps": 1_000_000, "checkpoint__interval": 10, "checkpoint__async_mode": mode}
    run = Ranks(options(corpus, tmp_path, metrics__log_freq=10, **changes), world_size=1, log_folder=tmp_path)
    folder = tmp_path / "run" / "checkpoint"
    wait_until(lambda: committed_steps(folder))
    pids = [run.pids[0], *children(run.pids[0])]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    wait_until(lambda: "could not be saved: rank 0: File too large" in run.output)
    run.signal(signal.SIGTERM)
    code, output = run.wait()
    newest = committed_steps(folder)[-1]
    assert code == 1
    assert f"the latest checkpoint is that of step {newest}. Remove the cause" in output
    assert newest == max(row["step"] for row in rows(tmp_path) if row.get("event") == "checkpoint saved")


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def test_sizes_are_shown_in_a_unit_of_their_magnitude():
    sizes = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 5_000_000, 1 << 30, 3 << 40]
    assert [format_bytes(size) for size in sizes] == [
        *("0 bytes", "1023 bytes", "1.00 KiB", "1.50 KiB", "1024.00 KiB", "1.00 MiB", "4.77 MiB"),
        *("1.00 GiB", "3072.00 GiB"),
    ]
