"""Tests of stopping.py and timeouts.py: requests to stop, by signals and by time limits, at every stage of a run."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.faults import ReplicaGroupWrapper, run_entry_point
from tests.support.harness import run_ranks
from tests.support.runs import Ranks, losses, options, read_json_lines, rows, train, wait_for_step
from torchtitan_clone.run.stopping import StopPolicy, StopRequest

REPOSITORY = Path(__file__).parents[2]


def test_a_run_asks_to_be_requeued_until_it_is_complete(corpus, tmp_path):
    def run(name):
        sizes = {"training__seq_len": 32, "model__args__n_layers": 1}
        return options(corpus, tmp_path / name, training__steps=40, preemption__requeue=True, **sizes)

    assert train(run("uninterrupted"), world_size=2, log_folder=tmp_path)[0] == 0
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        before = max(losses(tmp_path / "stopped"), default=0)
        stopped = Ranks(run("stopped"), world_size=2, log_folder=tmp_path)
        wait_for_step(tmp_path / "stopped", before + 2)
        stopped.signal(number, ranks=[1])
        stopped.signal(number)
        code, output = stopped.wait()
        assert code == 75
        assert f"stopped by {number.name}: step" in output
    assert train(run("stopped"), world_size=2, log_folder=tmp_path)[0] == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "uninterrupted")


def test_a_run_that_a_library_aborts_prints_what_its_threads_ran(corpus, tmp_path):
    command = [sys.executable, "-m", "torchtitan_clone.train", *options(corpus, tmp_path, training__steps=1000)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as run:
        try:
            wait_for_step(tmp_path, 2)
        finally:
            run.send_signal(signal.SIGABRT)
        _, error = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in error
    assert "in exit_process\n" in error


def test_a_signal_ends_a_validation(corpus, tmp_path):
    changes = {"validation__enable": True, "validation__freq": 1, "validation__local_batch_size": 1}
    argv = options(corpus, tmp_path, data__held_out_fraction=0.8, **changes)
    run = Ranks(argv, world_size=2, log_folder=tmp_path)
    wait_for_step(tmp_path, 1)
    run.signal(signal.SIGTERM, ranks=[1])
    code, output = run.wait()
    assert code == 0
    assert "stopped by a signal to another rank: step 1 is saved" in output
    assert "validation loss" not in output


class StopsInStep2(ReplicaGroupWrapper):
    """A replica group whose process is asked to stop in step 2."""

    def __init__(self, group):
        super().__init__(group)
        self.step = 0

    def commit(self, *, healthy):
        self.step += 1
        if self.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return self._group.commit(healthy=healthy)


def train_until_asked(argv):
    return run_entry_point(argv, wrap_replica_group=StopsInStep2)


def test_a_request_in_the_last_step_does_not_cost_its_validation(corpus, tmp_path):
    """The step is saved first, once; without time left, the validation ends."""
    tables = {"validation__enable": True, "validation__freq": 2, "checkpoint__interval": 2}
    for deadline in (None, 1e-9):
        argv = options(corpus, tmp_path, training__steps=2, **tables, preemption__deadline_seconds=deadline)
        argv += [f"--job.run_name={deadline}", "--validation.local_batch_size=1"]
        assert run_ranks(train_until_asked, 1, argv) == [0]
        of_step_2 = [row for row in read_json_lines(tmp_path / f"{deadline}" / "metrics.jsonl") if row["step"] == 2]
        found = ["validation_loss" if "validation_loss" in row else row.get("event") for row in of_step_2]
        validated = ["validation_loss"] if deadline is None else []
        assert [name for name in found if name not in (None, "goodput")] == ["checkpoint saved", *validated]


def test_a_last_validation_leaves_time_for_a_save():
    policy = StopPolicy(StopRequest(), max_seconds=3600, deadline_seconds=None, sum_over_ranks=list)
    assert not policy.is_out_of_time()
    policy.save_seconds = 3600
    assert policy.is_out_of_time()


def test_a_step_that_would_outlast_the_deadline_is_interrupted(corpus, tmp_path):
    def run(name, **changes):
        sizes = {"training__local_batch_size": 1, "training__global_batch_size": 40, "training__steps": 3}
        return options(corpus, tmp_path / name, **sizes, **changes)

    assert train(run("uninterrupted"), world_size=2, log_folder=tmp_path)[0] == 0
    step_seconds = min(row["step_seconds"] for row in rows(tmp_path / "uninterrupted") if "loss" in row)
    deadline = step_seconds / 2
    stopped = Ranks(run("stopped", preemption__deadline_seconds=deadline), world_size=2, log_folder=tmp_path)
    wait_for_step(tmp_path / "stopped", 2)
    stopped.signal(signal.SIGUSR1)
    time.sleep(deadline / 4)
    for later in (signal.SIGTERM, signal.SIGUSR1):  # later signals change nothing
        stopped.signal(later)
    code, output = stopped.wait()
    assert code == 0
    assert "stopped by SIGUSR1: step 2 is saved" in output
    assert list(losses(tmp_path / "stopped")) == [1, 2]
    assert train(run("stopped"), world_size=2, log_folder=tmp_path)[0] == 0
    ledger = [row for row in rows(tmp_path / "stopped") if row.get("event") == "goodput"][-1]
    assert ledger["steps_thrown_away"] == 1
    assert ledger["thrown_away_seconds"] > deadline / 2
    assert losses(tmp_path / "stopped") == losses(tmp_path / "uninterrupted")


def test_a_run_stops_when_its_time_is_up(corpus, tmp_path):
    def run(**changes):
        return options(corpus, tmp_path, checkpoint__interval=50, checkpoint__keep_latest_k=1, **changes)

    found, limit = [], 2.0
    while not found:  # a machine may need longer for its start
        longer = run(training__steps=1_000_000, training__max_seconds=limit, metrics__log_freq=10)
        code, output = train(longer, world_size=2, log_folder=tmp_path)
        assert code == 0
        found = re.findall(r"stopped by training.max_seconds: step (\d+) is saved", output)
        limit *= 2
    assert 0 < int(found[0]) < 1_000_000


def test_time_for_a_step_and_a_save_is_left():
    stop = StopRequest()
    assert not stop.is_wanted(max_seconds=None, seconds_needed=1e9)
    assert not stop.is_wanted(max_seconds=3600, seconds_needed=0)
    assert stop.reason is None
    assert stop.is_wanted(max_seconds=3600, seconds_needed=3600)
    assert stop.reason == "training.max_seconds"


HANDLERS = """
import signal, sys
from torchtitan_clone import train
installed = []
signal.signal = lambda number, _: installed.append((signal.Signals(number).name, "torch" in sys.modules))
train.main(["--no_such.option=1"])
print(sorted(installed))
"""


def test_signal_handlers_are_installed_before_torch_is_imported():
    command = [sys.executable, "-c", HANDLERS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[(name, False) for name in ('SIGHUP', 'SIGINT', 'SIGTERM', 'SIGUSR1', 'SIGUSR2')]}\n"


@pytest.mark.parametrize("moment", ["handlers are installed", "torch is imported"])
def test_a_signal_during_start_up_ends_the_process(corpus, tmp_path, moment):
    argv = options(corpus, tmp_path / "runs", preemption__requeue=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_clone.train", *argv],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not handles(process.pid, signal.SIGUSR1):
        assert process.poll() is None
    while moment.startswith("torch") and "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stopped by SIGUSR1 before the first step" in output
    assert not (tmp_path / "runs").exists()


def test_two_nodes_train_as_one_node_and_stop_together(corpus, tmp_path, python):
    sizes = {"training__seq_len": 32, "training__steps": 40}
    assert train(options(corpus, tmp_path / "one", **sizes), world_size=2, log_folder=tmp_path)[0] == 0

    def start() -> list[subprocess.Popen]:
        port = free_port()
        argv = [f"--job.config_file={os.devnull}", *options(corpus, tmp_path / "two", **sizes)]
        common = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NO_SETUP": "1"}
        common |= {"PYTHON": str(python), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [REPOSITORY / "run_train.sh", *argv]
        nodes = [os.environ | common | {"NODE_RANK": str(node)} for node in range(2)]
        return [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in nodes]

    nodes = start()
    wait_for_step(tmp_path / "two", 5)
    nodes[1].send_signal(signal.SIGTERM)
    output, _ = nodes[0].communicate(timeout=60)
    assert "stopped by a signal to another rank: step" in output
    assert [node.wait(60) for node in nodes] == [0, 0]
    nodes = start()
    output, _ = nodes[0].communicate(timeout=60)
    assert [node.wait(60) for node in nodes] == [0, 0]
    assert "training is complete" in output
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def handles(pid: int, number: int) -> bool:
    """Returns whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("is_one_late", [False, True])
def test_a_signal_during_start_up_ends_all_ranks(corpus, tmp_path, is_one_late):
    argv = options(corpus, tmp_path, preemption__requeue=True)
    assert train(argv, log_folder=tmp_path)[0] == 0  # tokenizes the text
    longer = options(corpus, tmp_path, preemption__requeue=True, training__steps=20)
    run = Ranks(longer, world_size=2, log_folder=tmp_path / "second")
    while not all(handles(pid, signal.SIGUSR1) for pid in run.pids):
        time.sleep(0.0005)
    if is_one_late:  # it ends before it reaches the other rank, which waits for it
        run.signal(signal.SIGSTOP, ranks=[1])
    while "sequences x" not in run.output:  # in the line about the run, after which the process group starts
        time.sleep(0.001)
    run.signal(signal.SIGUSR1)
    if is_one_late:
        run.signal(signal.SIGCONT, ranks=[1])
    code, output = run.wait()
    assert code == 75
    assert "before the first step" in output or "step 11 is saved" in output
