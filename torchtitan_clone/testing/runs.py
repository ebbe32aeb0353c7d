"""Small training runs for the tests: options, a corpus of real text, and what a run left behind."""

import json
import os
import shutil
import sysconfig
import time
from pathlib import Path

from torchtitan_clone.testing.harness import collect, start_ranks

MODEL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32}


def make_corpus(folder: Path, *, files: int = 30) -> Path:
    """A folder with the first modules of the standard library."""
    folder.mkdir(parents=True)
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        shutil.copy(module, folder)
    return folder


def short_documents(folder: Path) -> Path:
    """A folder with text in documents of five lines, so that most rows hold several."""
    folder.mkdir(parents=True)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text().splitlines()
    pieces = ["\n".join(text[first : first + 5]) for first in range(0, len(text), 5)]
    (folder / "pieces.jsonl").write_text("\n".join(json.dumps({"text": piece}) for piece in pieces))
    return folder


def options(corpus: Path, folder: Path, **changes) -> list[str]:
    """Command line of a run that takes milliseconds a step; `changes` are option names with __ for the dot, or None."""
    values = {
        "job.dump_folder": folder,
        "job.run_name": "run",
        "training.dataset_path": corpus,
        "data.cache_folder": corpus.parent / "cache",
        "data.held_out_fraction": 0.1,
        "training.seq_len": 64,
        "training.local_batch_size": 4,
        "training.global_batch_size": 8,
        "training.mixed_precision_param": "float32",
        "training.steps": 10,
        "optimizer.lr": 3e-3,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        **{f"model.args.{key}": value for key, value in MODEL.items()},
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    given = {key: value for key, value in values.items() if value is not None}
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]


class Ranks:
    """A run that was started on some ranks, with its output in files."""

    def __init__(self, argv: list[str], *, world_size: int, log_folder: Path, env=None):
        log_folder.mkdir(parents=True, exist_ok=True)
        self._logs = [log_folder / f"rank{rank}.log" for rank in range(world_size)]
        self._started = start_ranks(train_rank, world_size, argv, self._logs, env=env)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process, _ in self._started]

    def signal(self, number: int, *, ranks=None) -> None:
        """Sends a signal to these ranks, or to all."""
        for rank, pid in enumerate(self.pids):
            if ranks is None or rank in ranks:
                os.kill(pid, number)

    def wait(self, timeout: float = 120) -> tuple[int, str]:
        """Exit code, the same on all ranks, and rank 0's output."""
        codes = collect(self._started, timeout=timeout)
        assert len(set(codes)) == 1, f"exit codes {codes}:\n{self.output}"
        return codes[0], self.output

    def join(self) -> None:
        """Waits until all processes are gone, however they ended."""
        for process, _ in self._started:
            process.join(30)
            assert not process.is_alive()

    @property
    def output(self) -> str:
        """What rank 0 has printed so far."""
        return self._logs[0].read_text() if self._logs[0].exists() else ""


def train_rank(argv: list[str], logs: list[Path]) -> int:
    """What one rank does: the entry point with its output in a file."""
    from torchtitan_clone.train import main

    log = os.open(logs[int(os.environ["RANK"])], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return main(argv)


def train(argv: list[str], *, world_size: int = 1, log_folder: Path, timeout: float = 120, env=None):
    """Runs to the end; exit code and rank 0's output."""
    return Ranks(argv, world_size=world_size, log_folder=log_folder, env=env).wait(timeout)


def rows(folder: Path) -> list[dict]:
    """The run's metrics.jsonl."""
    file = folder / "run" / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def wait_for_step(folder: Path, step: int, *, timeout: float = 60) -> None:
    """Until the run has logged that step."""
    deadline = time.monotonic() + timeout
    while max(losses(folder), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached within {timeout} s"
        time.sleep(0.005)
