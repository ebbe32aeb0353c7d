"""How ranks end that another program than the launcher started, and those of which a process was killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import make_corpus, options, wait_for_step
from torchtitan_clone.run.stopping import explain_ended_process

STEPS = {"training__steps": 100_000, "validation__enable": False, "checkpoint__interval": 100_000}


class Ranks:
    """Ranks that find each other by environment variables, as srun starts them."""

    def __init__(self, folder: Path, *, count: int, python: Path | str = sys.executable, **changes: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._folder = folder
        self._logs = [folder / f"rank{rank}.log" for rank in range(count)]
        argv = options(make_corpus(folder / "corpus"), folder, **STEPS, **changes)
        common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, path in enumerate(self._logs):
            variables = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
            with path.open("w") as log:
                command = [python, "-m", "torchtitan_clone.train", *argv]
                process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        wait_for_step(self._folder, 2, timeout=200)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(self) -> list[int]:
        """Returns the exit codes."""
        return [process.wait(60) for process in self.processes]

    def errors(self, rank: int) -> list[str]:
        """Returns what a rank has said but for lines of level INFO; all lines of a rank other than 0."""
        return [line for line in self._logs[rank].read_text().splitlines() if rank or "ERROR" in line]


@pytest.mark.many_ranks
def test_all_ranks_end_in_order_after_a_signal(tmp_path):
    """Rank 0 serves the store, which the others ask whether the checkpoint is written."""
    with Ranks(tmp_path, count=3, training__global_batch_size=12) as ranks:
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        first, *others = ranks.processes
        while others[0].poll() is None and first.poll() is None:  # else rank 0 is seldom the first to end
            for number, seconds in ((signal.SIGSTOP, 0.05), (signal.SIGCONT, 0.01)):
                for process in others:
                    process.send_signal(number)
                time.sleep(seconds)
        assert ranks.wait() == [0, 0, 0]
        assert [ranks.errors(rank) for rank in range(3)] == [[], [], []]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_one_line_in_the_output_of_the_other(tmp_path, python, killed):
    with Ranks(tmp_path, count=2, python=python) as ranks:
        ranks.processes[killed].kill()
        codes = ranks.wait()
        assert codes[1 - killed] == 1
        (line,) = ranks.errors(1 - killed)
    assert "another rank has ended" in line
    assert line.endswith("rerun the same command to resume")


def workers(rank: int) -> list[int]:
    """Returns the processes that a rank has started to read data."""
    children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_killed_worker_is_one_line(tmp_path):
    with Ranks(tmp_path, count=1, data__num_workers=1) as ranks:
        end = time.monotonic() + 60
        while not (found := workers(ranks.processes[0].pid)):
            assert time.monotonic() < end, "the rank has no worker"
            time.sleep(0.02)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        assert ranks.wait() == [1]
        (line,) = ranks.errors(0)
    assert "a process that reads data has ended" in line
    assert line.endswith("lower data.num_workers; rerun the same command to resume")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4471"), "rank"),
        (RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.29"), "rank"),
        (BrokenPipeError("Broken pipe"), "rank"),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), "process that reads data"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "process that reads data"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ""),
        (ValueError("Connection closed by peer"), ""),
    ],
)
def test_errors_of_ended_processes_are_recognized(error, expected):
    outer = KeyError("batch")
    outer.__cause__ = error
    for each in (error, outer):
        found = explain_ended_process(each, is_alone=False)
        assert bool(found) == bool(expected)
        assert expected in found
        assert bool(explain_ended_process(each, is_alone=True)) == (expected == "process that reads data")
