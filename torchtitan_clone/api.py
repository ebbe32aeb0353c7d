"""Training and trained models from Python: in a script, a notebook or a test.

- A *configuration* is a `Config`, which `configure` reads from a file, a dict or both.
- `run` trains it in processes of its own, and returns a `RunResult`: this process stays as it was.
- A *row* is what a run logs at a step, as in its metrics.jsonl: a dict of numbers and texts.
- A *trained model* is opened from a run, a checkpoint or a Hugging Face folder, and generates or is evaluated here.

What the user can correct is a ConfigError. Importing this module imports no torch.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from torchtitan_clone.config import Config, ConfigError, load_config, run_folder, to_toml
from torchtitan_clone.config.resolved import checkpoint_folder, output_folder

if TYPE_CHECKING:
    from torchtitan_clone.tools.trained_model import TrainedModel

__all__ = [
    "Config",
    "ConfigError",
    "RunResult",
    "TrainingFailed",
    "configure",
    "evaluate",
    "generate",
    "open_model",
    "run",
]

Row = dict[str, float | int | str | None]
POLL_SECONDS = 0.1
LAST_LINES = 30


class TrainingFailed(Exception):
    """Training ended with an error; the text is the end of what it printed."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run has left in its folder."""

    folder: Path
    rows: list[Row]
    """All rows of the run, also those before it resumed."""
    complete: bool
    """Whether the last step is done; otherwise the run was stopped, and the same call goes on from its checkpoint."""
    checkpoint_folder: Path

    @cached_property
    def losses(self) -> dict[int, float]:
        """Training loss by step, of the steps that were logged (metrics.log_freq)."""
        return self.column("loss")

    def column(self, name: str) -> dict[int, float]:
        """Returns a number by step, of the rows that have it; docs/metrics.md lists the names."""
        found = ((row["step"], row.get(name)) for row in self.rows)
        return {int(step or 0): value for step, value in found if isinstance(value, int | float)}

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; None if nothing was saved."""
        from torchtitan_clone.checkpoint.folder import newest_complete_step, step_folder

        step = newest_complete_step(self.checkpoint_folder)
        return None if step is None else step_folder(self.checkpoint_folder, step)


def configure(file: str | Path | None = None, *, options: Mapping[str, object] | None = None) -> Config:
    """Returns the configuration of a file, or of a name in train_configs/, with options laid over it.

    Options are tables, as {"training": {"steps": 5}}, or have dotted names, as {"training.steps": 5}. Without a file
    they are laid over the defaults. ConfigError with all that is wrong with them.
    """
    return load_config([] if file is None else [f"--job.config_file={file}"], options=options or {})


def run(
    config: Config,
    *,
    on_row: Callable[[Row], object] | None = None,
    show: Literal["log", "bar", "nothing"] = "log",
    processes: int | None = None,
) -> RunResult:
    """Trains to the last step, or resumes there, and returns what was logged.

    It starts `processes` on this machine, by default one for each GPU, or one on a CPU, and shows their log or a bar of
    progress. `on_row` is called with each row soon after it was logged. An interrupt, such as that of a notebook, lets
    the present step finish and saves it; the result is not `complete`. ConfigError, TrainingFailed.
    """
    if config.job.dry_run or config.comm.mode == "fake_backend":
        raise ConfigError("run() trains: it takes neither job.dry_run nor comm.mode = fake_backend; unset them")
    rows, interrupted = _Rows(output_folder(config) / "metrics.jsonl"), False
    with tempfile.TemporaryDirectory() as temporary, _bar(config, show=show) as advance:
        file = Path(temporary, "run.toml")
        file.write_text(to_toml(config))
        started = _start(file, processes=processes)
        output = [_Echo(stream, echoes=show == "log") for stream in (started.stdout, started.stderr) if stream]
        try:
            while started.poll() is None:
                time.sleep(POLL_SECONDS)
                _pass_on(rows.new(), on_row, advance)
        except KeyboardInterrupt:
            interrupted = True
            started.send_signal(signal.SIGINT)
            started.wait()
        except BaseException:  # of `on_row`
            started.terminate()
            started.wait()
            raise
        finally:
            started.kill()  # after a second interrupt; what has ended is not affected
            texts = [each.text() for each in output]
        _pass_on(rows.new(), on_row, advance)
    if not interrupted:
        _raise_for(started.returncode, *texts)
    found = rows.all()
    is_complete = bool(found) and (found[-1]["step"], found[-1].get("complete")) == (config.training.steps, True)
    checkpoints = checkpoint_folder(run_folder(config.job), checkpoint=config.checkpoint)
    return RunResult(folder=output_folder(config), rows=found, complete=is_complete, checkpoint_folder=checkpoints)


def open_model(
    folder: str | Path, *, device: str | None = None, dtype: str = "float32", hf_assets_path: str | None = None
) -> "TrainedModel":
    """Returns the model of a run's newest checkpoint, of a step-N folder or of a folder of the Hugging Face hub.

    It is on the GPU if there is one, unless `device` says otherwise. `hf_assets_path` has its tokenizer if that is not
    where the run found it. ConfigError.
    """
    import torch

    from torchtitan_clone.tools.trained_model import open_trained_model

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype = {dtype}: must be float32 or bfloat16")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device = {device}: must be cpu, cuda or the index of a GPU, as cuda:1")
    place = torch.device(device)
    return open_trained_model(Path(folder), dtype=getattr(torch, dtype), device=place, hf_assets_path=hf_assets_path)


def generate(model: "TrainedModel", prompts: Sequence[str], **sampling: float) -> list[str]:
    """Returns the continuation of each prompt; `sampling` are fields of tools.generation.Sampling. ConfigError."""
    from torchtitan_clone.tools.generation import Generator, Sampling

    if unknown := sampling.keys() - vars(Sampling()).keys():
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such option; known: {', '.join(vars(Sampling()))}")
    generator = Generator(model, sampling=Sampling(**sampling))  # pyright: ignore[reportArgumentType], it checks them
    encoded = generator.encode(prompts)
    return [
        generator.decode(ids, after=before) for before, ids in zip(encoded, generator.complete(encoded), strict=True)
    ]


def evaluate(
    model: "TrainedModel", tasks: Sequence[str], *, include_path: str | Path | None = None, limit: int | None = None
) -> dict[str, dict[str, object]]:
    """Returns the metrics of tasks of lm-evaluation-harness, or of the tasks in a folder of the user's. ConfigError."""
    from torchtitan_clone.commands import evaluate as command

    manager = command.find_tasks(tasks, include_path=Path(include_path) if include_path else None)
    return command.evaluate(model, tasks=tasks, manager=manager, limit=limit)


class _Rows:
    """The rows that a run appends to a file; it is replaced where a run that resumes drops the last of them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._since = time.time()
        self._number = 0
        self._offset = 0

    def all(self) -> list[Row]:
        """Returns all rows; of a line that is being written, nothing."""
        return self._read(0)

    def new(self) -> list[Row]:
        """Returns the rows that were logged since the last call."""
        if not self._file.exists():
            return []
        if (number := self._file.stat().st_ino) != self._number:
            self._number, self._offset = number, 0
        found = [row for row in self._read(self._offset) if float(row["time"] or 0) > self._since]
        self._since = max([self._since, *(float(row["time"] or 0) for row in found)])
        return found

    def _read(self, offset: int) -> list[Row]:
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset = offset + len(whole) + len(newline)
        return [json.loads(line) for line in whole.split(b"\n") if line]


class _Echo:
    """Reads one stream of a process, so that it never fills, and keeps its last lines."""

    def __init__(self, stream: IO[str], *, echoes: bool) -> None:
        self._stream = stream
        self._echoes = echoes
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self._lines = [*self._lines[1 - LAST_LINES :], line]
            if self._echoes:
                sys.stdout.write(line)
                sys.stdout.flush()

    def text(self) -> str:
        """Returns the last lines, once the process has ended."""
        self._thread.join()
        self._stream.close()
        return "".join(self._lines)


def _start(file: Path, *, processes: int | None) -> subprocess.Popen[str]:
    """Starts training of a file; it ends if this process does."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CONFIG_FILE", "COMM_MODE")}
    environment |= {} if processes is None else {"NGPU": str(processes)}
    words = ["torchtitan_clone.launch.worker", str(os.getpid()), "torchtitan_clone.commands.train"]
    return subprocess.Popen(
        [sys.executable, "-m", *words, f"--job.config_file={file}"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt reaches it only through run()
    )


def _raise_for(code: int, output: str, errors: str) -> None:
    if code == 2:
        lines = errors.removeprefix("error: ").splitlines()
        raise ConfigError([line[4:] for line in lines if line.startswith("  - ")] or lines)
    if code not in (0, 75):
        raise TrainingFailed(f"exit code {code}\n{output}{errors}")


def _pass_on(rows: Sequence[Row], *receivers: Callable[[Row], object] | None) -> None:
    for row in rows:
        for receiver in filter(None, receivers):
            receiver(row)


@contextmanager
def _bar(config: Config, *, show: str) -> Iterator[Callable[[Row], object] | None]:
    """Yields what advances a bar of progress, that of a notebook where this is one; None if none is wanted."""
    if show != "bar":
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=config.training.steps, unit="step") as bar:

        def advance(row: Row) -> None:
            bar.update(int(row["step"] or 0) - bar.n)
            if isinstance(loss := row.get("loss"), float):
                bar.set_postfix(loss=f"{loss:.4f}")

        yield advance
