"""Small training runs: options, text to train on, ranks in real processes, and what a run has logged."""

import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.harness import collect, start_ranks

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32}
GLOBAL_BATCH_SIZE = 8
Row = dict[str, Any]
"""A line of a file of JSON lines."""


def make_corpus(folder: Path, *, files: int = 30) -> Path:
    """Writes a folder with the first modules of the standard library."""
    folder.mkdir(parents=True)
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        shutil.copy(module, folder)
    return folder


def make_short_documents(folder: Path) -> Path:
    """Writes documents of five lines: most rows hold several documents, which attention must keep apart."""
    folder.mkdir(parents=True)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text().splitlines()
    documents = ["\n".join(text[first : first + 5]) for first in range(0, len(text), 5)]
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return folder


def options(corpus: Path, folder: Path, **changes: object) -> list[str]:
    """Returns the command line of a run whose steps take milliseconds.

    `changes` are option names with __ in place of the dot; None leaves an option out.
    """
    values: dict[str, object] = {
        "job.dump_folder": folder,
        "job.run_name": "run",
        "training.dataset_path": corpus,
        "data.cache_folder": corpus.parent / "cache",
        "data.held_out_fraction": 0.1,
        "training.seq_len": 64,
        "training.local_batch_size": 4,
        "training.global_batch_size": GLOBAL_BATCH_SIZE,
        "training.mixed_precision_param": "float32",
        "training.steps": 10,
        "optimizer.lr": 3e-3,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        "activation_checkpoint.mode": "none",
        **{f"model.args.{key}": value for key, value in MODEL.items()},
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    given = {key: value for key, value in values.items() if value is not None}
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]


class Ranks:
    """The ranks of one started run, with their output in files."""

    def __init__(
        self, argv: list[str], *, world_size: int, log_folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._logs = [log_folder / f"rank{rank}.log" for rank in range(world_size)]
        self._started = start_ranks(train_rank, world_size, argv, self._logs, env=env)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.process.pid or 0 for rank in self._started]

    def signal(self, number: int, *, ranks: list[int] | None = None) -> None:
        """Sends a signal to these ranks, by default to all."""
        for rank, pid in enumerate(self.pids):
            if ranks is None or rank in ranks:
                os.kill(pid, number)

    def wait(self, timeout: float = 120) -> tuple[int, str]:
        """Returns the exit code, which must be the same on all ranks, and the output of rank 0."""
        codes = collect(self._started, timeout=timeout)
        assert len(set(codes)) == 1, f"exit codes {codes}:\n{self.output}"
        return codes[0], self.output

    def join(self) -> None:
        """Waits until all processes have ended, whatever their exit code."""
        for rank in self._started:
            rank.process.join(30)
            assert not rank.process.is_alive()

    @property
    def output(self) -> str:
        """What rank 0 has printed so far."""
        return self._logs[0].read_text() if self._logs[0].exists() else ""


def redirect_output(file: Path, *, append: bool = False) -> None:
    """Sends stdout and stderr of this process to a file, from what is printed next on."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(file, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC))
    os.dup2(log, 1)
    os.dup2(log, 2)


def train_rank(argv: list[str], logs: list[Path]) -> int:
    """Runs the entry point as one rank, with its output in a file."""
    from torchtitan_clone.train import main

    redirect_output(logs[int(os.environ["RANK"])])
    return main(argv)


def exit_codes(cases: list[list[str]], log: Path) -> list[tuple[int, str]]:
    """Returns exit code and output of the entry point for each command line, one after another in this process."""
    from torchtitan_clone.train import main

    results = []
    for argv in cases:
        redirect_output(log)
        results.append((main(argv), log.read_text()))
    return results


def train(
    argv: list[str],
    *,
    world_size: int = 1,
    log_folder: Path,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Trains to the end; returns the exit code and the output of rank 0."""
    return Ranks(argv, world_size=world_size, log_folder=log_folder, env=env).wait(timeout)


def read_json_lines(file: Path) -> list[Row]:
    """Returns the complete lines of a file of JSON lines; the file may be missing or still be written to."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def rows(folder: Path) -> list[Row]:
    """Returns the rows of the run's metrics.jsonl."""
    return read_json_lines(folder / "run" / "metrics.jsonl")


def losses(folder: Path) -> dict[int, float]:
    """Returns the training loss by step."""
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def wait_for_step(folder: Path, step: int, *, timeout: float = 60) -> None:
    """Waits until the run has logged this step."""
    deadline = time.monotonic() + timeout
    while max(losses(folder), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached within {timeout} s"
        time.sleep(0.005)
