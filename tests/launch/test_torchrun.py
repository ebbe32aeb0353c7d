"""Signals, exit codes and output of the launcher; arguments of run_train.sh; environment setup."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_clone.launch.torchrun import main

REPO = Path(__file__).parents[2]

WORKER = """
import os, signal, sys, time

rank, mode = int(os.environ["RANK"]), sys.argv[1]
received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: received.append(number))
if mode == "slow":
    time.sleep(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
open(f"started{rank}", "w").write(str(os.getpid()))
if mode == "configuration":
    sys.stderr.write("error: a.b = 1\\n")
    os._exit(2)
if mode == "crash" and rank == 1:
    raise RuntimeError("boom")
if mode == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not received:
    time.sleep(0.02)
if mode in ("save", "slow"):
    time.sleep(0.5)
    open(f"saved{rank}", "w").write(",".join(signal.Signals(number).name for number in received))
if mode == "requeue":
    time.sleep(rank)
    sys.exit(75)
"""


def launch(folder: Path, mode: str) -> subprocess.Popen:
    """Two workers in `folder`, whose output is piped."""
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torchtitan_clone.launch.torchrun", "--nproc-per-node=2", "--module=worker", mode]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{REPO}", "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_exit_code_2_is_passed_on_without_output(tmp_path):
    assert finish(launch(tmp_path, "configuration")) == (2, "", "error: a.b = 1\n")


def test_crash_of_a_hidden_rank_prints_one_block(tmp_path):
    code, out, err = finish(launch(tmp_path, "crash"))
    assert (code, out) == (1, "")
    lines = err.splitlines()
    rank_1 = "  rank 1: exit code 1"
    # The other rank may follow, if it had not exited by itself.
    first, *_, boom, headline = lines[: lines.index(rank_1)]
    assert first == "Traceback (most recent call last):"
    assert boom == "RuntimeError: boom"
    assert headline.startswith("launch: training failed; logs of ranks that are not shown: ")
    assert "RuntimeError: boom" in next(Path(headline.rsplit(" ", 1)[1]).rglob("1/stderr.log")).read_text()


def test_killed_rank_is_reported_with_its_signal(tmp_path):
    code, _, err = finish(launch(tmp_path, "die"))
    assert code == 128 + signal.SIGKILL
    assert err.splitlines()[1:] == ["  rank 1: killed by SIGKILL"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_forwarded_to_the_workers_once(tmp_path, number):
    process = launch(tmp_path, "save")
    wait_for(tmp_path / "started0", tmp_path / "started1")
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (0, "")
    name = signal.Signals(number).name
    assert err == f"launch: {name}: workers finish the current step and save; Ctrl-\\ kills them\n"
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [name, name]


def test_signal_during_worker_startup_stays_pending(tmp_path):
    process = launch(tmp_path, "slow")
    wait_for(tmp_path / "started0")
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 0
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]


def test_requeue_exit_code_is_passed_on_without_output(tmp_path):
    process = launch(tmp_path, "requeue")
    wait_for(tmp_path / "started0", tmp_path / "started1")
    process.send_signal(signal.SIGUSR1)
    code, out, err = finish(process)
    assert (code, out) == (75, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGQUIT, 128 + signal.SIGQUIT)]
)
def test_workers_do_not_outlive_the_launcher(tmp_path, number, code):
    process = launch(tmp_path, "wait")
    wait_for(tmp_path / "started0", tmp_path / "started1")
    pids = [int((tmp_path / f"started{rank}").read_text()) for rank in (0, 1)]
    process.send_signal(number)
    assert finish(process)[0] == code
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def python(tmp_path) -> Path:
    """A fake Python that prints its arguments and passes the check of the environment."""
    file = tmp_path / "python"
    file.write_text('#!/bin/sh\necho "WORLD_SIZE=$WORLD_SIZE $*"\n')
    file.chmod(0o755)
    return file


def run_train(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    cleared = {"NGPU", "CONFIG_FILE", "LOG_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"}
    cleared |= {"PYTHON", "NO_SETUP"}
    inherited = {key: value for key, value in os.environ.items() if key not in cleared}
    return subprocess.run(
        [REPO / "run_train.sh", *arguments],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


DEFAULT = f"--job.config_file={REPO}/train_configs/debug_model.toml"


@pytest.mark.parametrize(
    ("environment", "arguments", "called"),
    [
        ({"NGPU": "1"}, ["--training.steps=20"], f"-m torchtitan_clone.train {DEFAULT} --training.steps=20"),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], f"-m torchtitan_clone.train {DEFAULT}"),
        (
            {"NGPU": "1", "CONFIG_FILE": "my.toml"},
            ["--model.flavor=1B"],
            "-m torchtitan_clone.train --job.config_file=my.toml --model.flavor=1B",
        ),
        (
            {"NGPU": "1", "CONFIG_FILE": "my.toml"},
            ["--job.config_file", "other.toml"],
            "-m torchtitan_clone.train --job.config_file other.toml",
        ),
        (
            {"NGPU": "2", "LOG_RANK": "0,1"},
            [],
            f"-m torchtitan_clone.launch.torchrun --nproc-per-node=2 --log-rank=0,1 {DEFAULT}",
        ),
        (
            {"NGPU": "1", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head"},
            [],
            "-m torchtitan_clone.launch.torchrun --nproc-per-node=1 --log-rank=0 --nnodes=2 --node-rank=1 "
            "--master-addr=head "
            f"--master-port=29500 {DEFAULT}",
        ),
    ],
)
def test_arguments_of_run_train(tmp_path, python, environment, arguments, called):
    answer = run_train(*arguments, cwd=tmp_path, PYTHON=str(python), **environment)
    assert answer.stdout == f"WORLD_SIZE= {called}\n"
    assert (answer.returncode, answer.stderr) == (0, "")


def test_dry_run_is_one_process_with_the_world_size(tmp_path, python):
    answer = run_train("--dry-run", cwd=tmp_path, PYTHON=str(python), NGPU="4", NNODES="2")
    assert answer.stdout == f"WORLD_SIZE=8 -m torchtitan_clone.train {DEFAULT} --dry-run\n"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "setup: NNODES = 2 and NODE_RANK is not set; set it to the index of this node, from 0"),
        (
            {"NODE_RANK": "0"},
            "setup: NNODES = 2 and MASTER_ADDR is not set; set it to the address of the node with NODE_RANK 0",
        ),
        ({"NODE_RANK": "2", "MASTER_ADDR": "127.0.0.1"}, "error: NODE_RANK = 2: must be at most 1 with NNODES 2"),
    ],
)
def test_missing_or_invalid_node_variables(tmp_path, environment, problem):
    answer = run_train(cwd=tmp_path, PYTHON=sys.executable, NO_SETUP="1", NGPU="1", NNODES="2", **environment)
    assert (answer.returncode, answer.stderr) == (2, f"{problem}\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--nproc-per-node=-1"], "NGPU = -1: must be an integer of at least 1"),
        (["--nnodes=two"], "NNODES = two: must be an integer of at least 1"),
        (["--nnodes=2", "--node-rank=-1"], "NODE_RANK = -1: must be an integer of at least 0"),
        (["--master-port=70000"], "MASTER_PORT = 70000: must be an integer from 1 to 65535"),
        (["--log-rank=0,7"], "LOG_RANK = 0,7: no local rank 7; available: 0, 1"),
        (
            ["--log-folder=/proc/here"],
            "LOG_FOLDER = /proc/here: cannot create it: No such file or directory; set it to",
        ),
        (["--master-addr=no-such.invalid"], "MASTER_ADDR = no-such.invalid: unknown host; set it to the"),
    ],
)
def test_invalid_options_name_the_variables_of_run_train(capfd, options, problem):
    assert main(["--nproc-per-node=2", *options]) == 2
    assert capfd.readouterr().err.startswith(f"error: {problem}")


def test_unusable_python_is_reported_with_the_reason(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    answer = run_train(cwd=tmp_path, PYTHON=bare)
    assert answer.returncode == 2
    assert answer.stderr.startswith(
        f"setup: PYTHON={bare} cannot be used: torch is not installed, torchdata is not installed"
    )
    assert "No module named" in run_train(cwd=tmp_path, PYTHON=bare, NO_SETUP="1", NGPU="1").stderr


@pytest.mark.parametrize(
    ("version", "fits"), [("2.11.0", True), ("2.13.0+cpu", True), ("2.14", False), ("2.9.1", False)]
)
def test_installed_versions_are_compared_as_numbers(tmp_path, version, fits):
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["tried>=2.11,<2.14"]')
    installed = tmp_path / f"tried-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tried\nVersion: {version}\n")
    command = [sys.executable, REPO / "scripts" / "check_environment.py", tmp_path / "pyproject.toml"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == (0 if fits else 1)
    assert answer.stderr == ("" if fits else f"tried {version} does not satisfy tried>=2.11,<2.14\n")
