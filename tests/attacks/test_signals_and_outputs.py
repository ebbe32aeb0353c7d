"""Attacks on the processes of a run: closed outputs, closed terminals, kills, and names that forge lines of a log.

Of torchtitan_clone/observe/outputs.py, torchtitan_clone/observe/logging.py, torchtitan_clone/config/environment.py
and torchtitan_clone/launch/rank_logs.py.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.harness import start_ranks
from tests.support.runs import Ranks, options, rows, train_rank, wait_for_step
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.environment import STOP_SIGNALS
from torchtitan_clone.train import main

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHON": sys.executable,
    "PYTHONPATH": str(REPOSITORY),
    "NO_SETUP": "1",
    "NGPU": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
RUN_TRAIN = str(REPOSITORY / "run_train.sh")
CLOSED = 'exec "$@" >&- 2>&-'
NOTE = "note: standard output cannot be written ({}); what is printed there is lost\n"


@pytest.fixture(autouse=True)
def signals_as_in_a_shell():
    """Lets processes that the tests start handle SIGHUP, also where the suite runs under nohup."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_until(condition, *, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------- closed outputs


def test_a_run_outlives_its_outputs(corpus, tmp_path, python):
    def run(name: str, *prefix: str, **files) -> subprocess.Popen:
        argv = options(corpus, tmp_path / name, training__steps=4)
        return subprocess.Popen([*prefix, RUN_TRAIN, *argv], env=ENVIRONMENT, text=True, **files)

    pipe = subprocess.PIPE
    runs = {
        "head": run("head", "env", "NGPU=2", f"PYTHON={python}", stdout=pipe, stderr=pipe),
        "closed": run("closed", "sh", "-c", CLOSED, "sh"),
    }
    runs["head"].stdout.readline()
    runs["head"].stdout.close()
    assert runs["head"].stderr.read() == NOTE.format("Broken pipe")
    assert {name: process.wait(120) for name, process in runs.items()} == dict.fromkeys(runs, 0)
    for name in runs:
        assert [row["step"] for row in rows(tmp_path / name) if "loss" in row] == [1, 2, 3, 4]
        assert committed_steps(tmp_path / name / "run" / "checkpoint") == [4]


def test_a_closed_output_keeps_the_exit_code(tmp_path):
    for redirection in (">&- 2>&-", ">/dev/full 2>&1", "2>&-", "<&- >&-"):
        for arguments, code in ((["--no.such=1"], 2), (["--help"], 0)):
            command = ["sh", "-c", f'exec "$@" {redirection}', "sh", RUN_TRAIN, *arguments]
            done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
            assert done.returncode == code, (redirection, done.stderr)
            assert "Traceback" not in done.stdout + done.stderr
            assert done.stderr.count("note: ") == (redirection == "<&- >&-")


# ---------------------------------------------------------------------------------------------------------- hang-ups


def test_closing_the_terminal_saves(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=1_000_000, checkpoint__interval=1_000_000)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(RUN_TRAIN, [RUN_TRAIN, *argv], ENVIRONMENT)
    wait_until(lambda: drain(terminal) and any("loss" in row for row in rows(tmp_path)))
    os.close(terminal)  # the kernel sends SIGHUP, and every later write to the terminal fails
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    trained = max(row["step"] for row in rows(tmp_path) if "loss" in row)
    assert committed_steps(tmp_path / "run" / "checkpoint") == [trained]


def drain(terminal: int) -> bool:
    """Reads what was printed, so that the process does not wait for it to be read."""
    while select.select([terminal], [], [], 0)[0]:
        os.read(terminal, 1 << 16)
    return True


def train_under_nohup(argv: list[str], logs: list[Path]) -> int:
    """Trains as a rank that was started by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return train_rank(argv, logs)


def test_a_run_under_nohup_goes_on(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=1_000_000, checkpoint__interval=1_000_000)
    (rank,) = start_ranks(train_under_nohup, 1, argv, [tmp_path / "log"])
    wait_for_step(tmp_path, 1)
    os.kill(rank.process.pid, signal.SIGHUP)
    wait_for_step(tmp_path, max(row["step"] for row in rows(tmp_path)) + 5)
    os.kill(rank.process.pid, signal.SIGTERM)
    rank.process.join(60)
    assert "stopped by SIGTERM" in (tmp_path / "log").read_text()


def test_a_hangup_of_all_processes_saves(corpus, tmp_path):
    """The writer process, which is among them, must outlive the trainer's last save."""
    mode = "async_with_pinned_mem"
    changes = {"training__steps": 1_000_000, "checkpoint__interval": 50, "checkpoint__async_mode": mode}
    run = Ranks(options(corpus, tmp_path, **changes), world_size=1, log_folder=tmp_path)
    wait_until(lambda: committed_steps(tmp_path / "run" / "checkpoint"))
    for pid in (*children(run.pids[0]), run.pids[0]):
        os.kill(pid, signal.SIGHUP)
    code, output = run.wait()
    (step,) = re.findall(r"stopped by SIGHUP: step (\d+) is saved", output)
    assert (code, committed_steps(tmp_path / "run" / "checkpoint")[-1]) == (0, int(step))
    assert "writer process" not in output


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


# -------------------------------------------------------------------------------------------------------- nothing left

WORKER = """
import os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda *_: os._exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
sys.stderr.write("hidden")
open("started", "w").close()
time.sleep(600)
"""


def test_killed_launchers_leave_nothing_behind(tmp_path, python):
    """tests/launch/test_torchrun.py kills others, which have started, with SIGKILL and SIGQUIT."""
    kills = [("started", signal.SIGHUP), ("starting", signal.SIGKILL), ("starting", signal.SIGTERM)]
    launchers = []
    for moment, number in kills:
        folder = tmp_path / f"{moment}{number}"
        (folder / "tmp").mkdir(parents=True)
        (folder / "worker.py").write_text(WORKER)
        launcher = ["torchtitan_clone.launch.torchrun", "--nproc-per-node=2", "--train-file=worker"]
        environment = ENVIRONMENT | {"PYTHONPATH": f"{folder}:{REPOSITORY}", "TMPDIR": str(folder / "tmp")}
        command = [python if moment == "started" else sys.executable, "-m", *launcher]
        launchers.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL))
    for (moment, number), launcher in zip(kills, launchers, strict=True):
        if moment == "started":
            wait_until((tmp_path / f"{moment}{number}" / "started").exists)
        else:  # torch is imported, and no worker runs yet
            wait_until(lambda pid=launcher.pid: "libtorch" in Path(f"/proc/{pid}/maps").read_text())
        launcher.send_signal(number)
    for (moment, number), launcher in zip(kills, launchers, strict=True):
        launcher.wait(60)
        assert list((tmp_path / f"{moment}{number}" / "tmp").rglob("*")) == []


def test_loader_workers_leave_no_semaphores_when_their_trainer_is_killed(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=1_000_000, data__num_workers=1, checkpoint__enable=False)
    with (tmp_path / "stderr").open("w") as stderr:
        command = [sys.executable, "-m", "torchtitan_clone.train", *argv]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=stderr)
    wait_for_step(tmp_path, 3, timeout=120)
    tracker_and_worker = children(process.pid)
    semaphores = set(re.findall(r"/dev/shm/sem\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    assert (len(tracker_and_worker), len(semaphores)) == (2, 11)
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tracker_and_worker))
    assert [name for name in semaphores if Path(name).exists()] == []
    assert "semaphore" not in (tmp_path / "stderr").read_text()


# ------------------------------------------------------------------------------------------------------------- forgery

FORGED = "run\n2026-01-01 00:00:00 training is complete\r\x1b[2J\x9b1A"
ESCAPED = r"run\n2026-01-01 00:00:00 training is complete\r\x1b[2J\x9b1A"
LOGGER = f"""
import sys
from torchtitan_clone.observe.logging import logger, setup_logging
setup_logging(rank=0, color=False)
logger.info("%s", {FORGED!r})
logger.warning("%s cannot be read", {FORGED!r})
try:
    raise OSError({FORGED!r})
except OSError:
    logger.exception("failed")
"""


def test_names_cannot_forge_lines_of_the_log():
    command = [sys.executable, "-c", LOGGER]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    info, warning, *trace = done.stdout.split("\n")
    assert info.endswith(f" {ESCAPED}")
    assert warning.endswith(f" WARNING [rank 0] {ESCAPED} cannot be read")
    assert "OSError: run" in trace
    own = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ERROR \[rank 0\] failed|Traceback.*|OSError: run| .*|)")
    assert [line for line in trace if not own.fullmatch(line)] == []
    assert all(line.isprintable() for line in done.stdout.split("\n"))


def test_names_cannot_forge_lines_of_an_error(capfd):
    for argument in (f"--training.steps={FORGED}", f"--training.x{FORGED}=1", f"--job.config_file={FORGED}", FORGED):
        with pytest.raises(ConfigError) as caught:
            load_config([argument])
        assert str(caught.value).isprintable()
        assert "run\\n2026-01-01" in str(caught.value)
    assert main([f"--job.config_file={FORGED}", f"--training.steps={FORGED}"]) == 2
    printed = capfd.readouterr().err
    assert len(printed.splitlines()) == 3
    assert not re.search("^2026", printed, re.MULTILINE)
    assert "\x1b" not in printed


def test_names_cannot_forge_lines_of_a_dry_run(capfd, corpus, tmp_path):
    folder = re.sub("[\n\r]", "\t", FORGED)  # with a line break it is an error
    argv = options(corpus, tmp_path / folder, job__description=FORGED)
    assert main([*argv, "--dry-run"]) == 0
    lines = capfd.readouterr().out.split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026") for line in lines)
    escaped = re.sub(r"\\[nr]", r"\\t", ESCAPED)
    assert f"run folder        {tmp_path}/{escaped}/run" in lines
