"""Tests of torchrun.py, rendezvous.py, rank_logs.py and worker.py: signals, exit codes and output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.processes import is_alive
from tests.launch.slurm_cluster import free_ports
from torchtitan_clone.launch.torchrun import main

REPO = Path(__file__).parents[2]

WORKER = """
import os, signal, sys, time

rank, mode = int(os.environ["RANK"]), sys.argv[1]
received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: received.append(number))
if mode == "slow":
    time.sleep(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
open(f"started{rank}", "w").write(str(os.getpid()))
if mode == f"configuration{rank}":
    sys.stderr.write("error: a.b = 1\\n")
    os._exit(2)
if mode == "crash" and rank == 1:
    raise RuntimeError("boom")
if mode == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "real-time" and rank == 1:
    os.kill(os.getpid(), 40)
while not received:
    time.sleep(0.02)
if mode in ("save", "slow"):
    time.sleep(0.5)
    open(f"saved{rank}", "w").write(",".join(signal.Signals(number).name for number in received))
if mode == "requeue":
    time.sleep(rank)
    sys.exit(75)
"""


@pytest.fixture
def launch(tmp_path, python):
    """Starts two workers in a given mode, whose output is piped; kills what is left of them after the test."""
    started: list[subprocess.Popen] = []

    def start(mode: str, *options: str, interpreter: str | Path = python) -> subprocess.Popen:
        (tmp_path / "worker.py").write_text(WORKER)
        (tmp_path / "tmp").mkdir(exist_ok=True)
        launcher = ["torchtitan_clone.launch.torchrun", "--nproc-per-node=2", "--train-file=worker", *options, mode]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}", "TMPDIR": str(tmp_path / "tmp")}
        environment["OMP_NUM_THREADS"] = "1"  # the stand-in would start threads, which do not block signals
        pipe = subprocess.PIPE
        command = [interpreter, "-m", *launcher]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()  # workers die with the launcher


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def wait_for(*files: Path) -> None:
    """Waits for files with content; pytest's timeout ends a test whose workers hang."""
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_configuration_error_of_a_shown_or_hidden_rank_is_printed_once(launch, rank):
    assert finish(launch(f"configuration{rank}")) == (2, "", "error: a.b = 1\n")


def test_crash_of_a_hidden_rank_prints_one_block(launch):
    code, out, err = finish(launch("crash"))
    assert (code, out) == (1, "")
    lines = err.splitlines()
    rank_1 = "  rank 1: exit code 1"
    # The other rank may follow, if it had not exited by itself.
    first, *_, boom, headline = lines[: lines.index(rank_1)]
    assert first == "Traceback (most recent call last):"
    assert boom == "RuntimeError: boom"
    assert headline.startswith("launch: training failed; logs of ranks that are not shown: ")
    assert "RuntimeError: boom" in next(Path(headline.rsplit(" ", 1)[1]).rglob("1/stderr.log")).read_text()


def test_killed_rank_is_reported_with_its_signal(launch):
    code, _, err = finish(launch("die"))
    assert code == 128 + signal.SIGKILL
    cause, *others = err.splitlines()[1:]
    assert cause == "  rank 1: killed by SIGKILL"
    assert others in ([], ["  rank 0: killed by SIGTERM"])  # it may not have had handlers yet


def test_a_signal_without_a_name_is_reported_by_its_number(launch):
    code, _, err = finish(launch("real-time"))
    assert (code, err.splitlines()[1]) == (128 + 40, "  rank 1: killed by signal 40")


def test_a_failure_is_told_without_the_logs_of_an_earlier_launch(launch):
    assert "RuntimeError: boom" in finish(launch("crash", "--log-folder=logs"))[2]
    code, _, err = finish(launch("die", "--log-folder=logs"))
    assert (code, err.splitlines()[0]) == (
        128 + signal.SIGKILL,
        "launch: training failed; logs of ranks that are not shown: logs",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_forwarded_to_the_workers_once(launch, tmp_path, number):
    process = launch("save")
    wait_for(tmp_path / "started0", tmp_path / "started1")
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (0, "")
    name = signal.Signals(number).name
    assert err == f"launch: {name}: workers finish the current step and save; Ctrl-\\ kills them\n"
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == [name, name]


def test_signal_during_worker_startup_stays_pending(launch, tmp_path):
    process = launch("slow")
    wait_for(tmp_path / "started0")
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 0
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1", "SIGUSR1"]


def test_requeue_exit_code_is_passed_on_without_output(launch, tmp_path):
    process = launch("requeue")
    wait_for(tmp_path / "started0", tmp_path / "started1")
    process.send_signal(signal.SIGUSR1)
    code, out, err = finish(process)
    assert (code, out) == (75, "")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGQUIT, 128 + signal.SIGQUIT)]
)
def test_a_killed_launcher_leaves_nothing_behind(launch, tmp_path, number, code):
    process = launch("wait", interpreter=sys.executable)
    wait_for(tmp_path / "started0", tmp_path / "started1")
    pids = [int((tmp_path / f"started{rank}").read_text()) for rank in (0, 1)]
    process.send_signal(number)
    assert finish(process)[0] == code
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.05)
    assert list((tmp_path / "tmp").rglob("*")) == []


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
            "LOG_FOLDER = /proc/here: cannot write to it: No such file or directory; set it to",
        ),
        (["--log-folder=/proc"], "LOG_FOLDER = /proc: cannot write to it: No such file or directory; set it to"),
        (["--master-addr=no-such.invalid"], "MASTER_ADDR = no-such.invalid: unknown host; set it to the"),
        (["--master-addr=node0..cluster"], "MASTER_ADDR = node0..cluster: unknown host; set it to the"),
        (
            ["--master-addr=192.0.2.199", "--nnodes=2", "--node-rank=0"],
            "MASTER_ADDR = 192.0.2.199: node 0 cannot listen there: Cannot assign requested address; set it to an",
        ),
    ],
)
def test_invalid_options_name_the_variables_of_run_train(capfd, options, problem):
    assert main(["--nproc-per-node=2", *options]) == 2
    assert capfd.readouterr().err.startswith(f"error: {problem}")


def test_every_rank_prints_what_is_wrong_with_the_options():
    """The launcher ends the others when the first rank fails, maybe before the one that is shown prints."""
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "torchtitan_clone.train", "--training.steps=x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'error: command line: training.steps = "x": must be an integer\n'


def test_a_signal_ends_a_launcher_that_waits_for_other_nodes(tmp_path, python):
    """The workers of this node have ended, those of the other one have not."""
    (tmp_path / "worker.py").write_text(
        "import os, time\nrank = int(os.environ['RANK'])\nopen(f'started{rank}', 'w').write('1')\ntime.sleep(60 * rank)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}", "OMP_NUM_THREADS": "1"}
    options = ["--nproc-per-node=1", "--nnodes=2", f"--master-port={free_ports(1)}", "--train-file=worker"]
    options.append("--master-addr=127.0.0.1")
    command = [python, "-m", "torchtitan_clone.launch.torchrun", *options]
    pipe = subprocess.PIPE
    nodes = [
        subprocess.Popen([*command, f"--node-rank={node}"], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe)
        for node in range(2)
    ]
    try:
        wait_for(tmp_path / "started0", tmp_path / "started1")
        time.sleep(2)  # until the agent has noticed that its worker has ended
        nodes[0].send_signal(signal.SIGTERM)
        assert nodes[0].wait(10) == 128 + signal.SIGTERM
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
