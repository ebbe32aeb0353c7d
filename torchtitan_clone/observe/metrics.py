"""Metrics of a run: console lines, rows of metrics.jsonl, TensorBoard and Weights & Biases.

Only rank 0 logs, over all ranks. A run that resumes after step k drops the rows after k.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.config.schema import Metrics
from torchtitan_clone.documents import DocumentError, escape, open_regular, parse_json, read_regular
from torchtitan_clone.files import write_atomically
from torchtitan_clone.observe.by_source import Totals, add_totals, source_columns
from torchtitan_clone.observe.flops import format_flops
from torchtitan_clone.observe.goodput import (
    EVENT,
    MAX_METRICS_BYTES,
    Ledger,
    describe_goodput,
    last_sign,
    read_rows,
    resumed_ledger,
)
from torchtitan_clone.observe.logging import logger
from torchtitan_clone.observe.records import STARTS_FILE, append_record, ignore_disk_errors, open_to_append

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"
AUXILIARY = "auxiliary/"
"""Prefix of the columns of additional loss terms, which the console shows too."""
_WANDB_ID = re.compile(rb"\w{1,64}")
Value = float | str | None
"""A column of a row; None stands for a number that is not finite."""
Columns = Mapping[str, Value]
"""Named values of one step or event: whoever measures a value adds its column, as run/measuring.py does for a step.

A row is its columns between `step` and `time`, the time of logging in seconds since the epoch.
"""


@dataclass
class _Interval:
    start: float = field(default_factory=time.perf_counter)
    num_steps: int = 0
    data_seconds: float = 0.0
    by_source: dict[int, Mapping[str, Totals]] = field(default_factory=dict[int, Mapping[str, Totals]])
    """Of each step since the last logged one; restart_interval() keeps them."""


def speed_columns(*, tokens: int, seconds: float, flops_per_token: float, peak_flops: float | None) -> dict[str, float]:
    """Returns the columns of speed over all ranks of a step of so many tokens; without MFU if the peak is not known.

    `peak_flops` is the sum of all devices, in FLOPs per second.
    """
    flops_per_second = tokens / seconds * flops_per_token
    columns = {"tokens_per_second": tokens / seconds, "tflops_per_second": flops_per_second / 1e12}
    return columns if peak_flops is None else columns | {"mfu_percent": 100 * flops_per_second / peak_flops}


class MetricsWriter:
    """Logs metrics on rank 0 to the console and to sinks in the run's `folder`; call `start` before logging.

    `ensure_folder` is called before each row, and recreates the folder if it is gone. `environment` describes this
    process, which began at `started` (seconds since the epoch), in starts.jsonl.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        folder: Path,
        rank: int,
        total_steps: int,
        run_config: dict[str, object],
        environment: Mapping[str, object],
        started: float,
        ensure_folder: Callable[[], object],
    ) -> None:
        self.active = rank == 0
        self._file = folder / METRICS_FILE
        self.sinks = _build_sinks(metrics, file=self._file, run_config=run_config) if self.active else []
        self.ledger = Ledger(started=started)
        self._started = started
        self._environment = environment
        self._ensure_folder = ensure_folder
        self._newest_step = 0
        self._interval = _Interval()
        self._total_steps = total_steps
        self._bar: tqdm | None = None
        self._opened = contextlib.ExitStack()

    def start(self, *, after_step: int, lost: Collection[int] = ()) -> None:
        """Starts logging after `after_step`, once; `lost` are earlier steps that other replica groups repeated."""
        self.restart_interval()
        if not self.active:
            return
        self.ledger = resumed_ledger(self._file, resume_step=after_step, lost=len(lost), started=self._started)
        start = {"time": self._started, "after_step": after_step, **last_sign(self._file), **self._environment}
        append_record(self._file.with_name(STARTS_FILE), start)
        self._forget(after_step, lost)
        if self.ledger.row()["starts"] > 1:  # else what was dropped would be forgotten if this process died now
            self.log_goodput(after_step)
        if sys.stdout.isatty():
            self._bar = _show_bar(self._total_steps, done=after_step, opened=self._opened)

    def forget(self, *, after_step: int, lost: Collection[int] = ()) -> None:
        """Drops the rows after `after_step` and those of the steps in `lost`; cheap if there are none."""
        self._interval.by_source = {k: sums for k, sums in self._interval.by_source.items() if k <= after_step}
        if self.active and (lost or self._newest_step > after_step):
            self._forget(after_step, lost)

    def _forget(self, after_step: int, lost: Collection[int]) -> None:
        self._newest_step = after_step
        for sink in self.sinks:
            ignore_disk_errors(partial(sink.forget, after_step=after_step, lost=lost))

    def restart_interval(self) -> None:
        """Starts a new interval of averaged times, without time outside of steps (a save, a validation)."""
        self._interval = _Interval(by_source=self._interval.by_source)

    def observe_step(self, step: int, *, data_seconds: float, by_source: Mapping[str, Totals]) -> None:
        """Adds a step, logged or not, to the averaging interval; `data_seconds` is its wait for data."""
        self._interval.num_steps += 1
        self._interval.by_source[step] = by_source
        self._interval.data_seconds += data_seconds

    def mean_seconds(self) -> tuple[float, float]:
        """Returns the mean time of the steps in the averaging interval, and their mean wait for data."""
        interval = self._interval
        seconds = time.perf_counter() - interval.start
        return seconds / interval.num_steps, interval.data_seconds / interval.num_steps

    def log(self, step: int, columns: Mapping[str, float]) -> None:
        """Logs a training step, with the losses by source since the last one, and starts a new averaging interval."""
        if self.active:
            logger.info(_step_line(step, columns, total_steps=self._total_steps))
            by_source = reduce(add_totals, self._interval.by_source.values(), {})
            self._write(step, {**columns, **source_columns(by_source)})
        self._interval = _Interval()

    def log_validation(self, step: int, loss: float, **values: float) -> None:
        """Logs a validation after `step`; `values` are further columns, with their unit in the name."""
        if self.active:
            logger.info("step %s  validation loss %.4f%s", f"{step:,}", loss, _named(values))
            self._write(step, {"validation_loss": loss, **values})

    def log_event(self, step: int, name: str, **values: Value) -> None:
        """Logs another event at `step`, for example a save and its seconds."""
        if self.active:
            logger.info("step %s  %s%s", f"{step:,}", name, _named(values))
            self._write(step, {"event": name, **values})

    def log_goodput(self, step: int, *, complete: bool = False) -> str:
        """Writes the goodput so far, and returns it as text; `complete` marks the end of the run's last step."""
        row = self.ledger.row()
        if self.active:
            self._write(step, {"event": EVENT, "complete": complete, **row})
        return describe_goodput(row)

    def progress(self, step: int) -> None:
        if self._bar:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._opened.close()
        for sink in self.sinks:
            ignore_disk_errors(sink.close)

    def _write(self, step: int, columns: Columns) -> None:
        row = {"step": step, **{name: _finite(value) for name, value in columns.items()}, "time": time.time()}
        self._newest_step = max(self._newest_step, step)
        self._ensure_folder()
        for sink in self.sinks:
            ignore_disk_errors(sink.write, row)


def check_metrics(metrics: Metrics) -> None:
    """Raises ConfigError if a package that the options need is not installed."""
    if metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        remedy = f"{install('wandb')}, or set it to false"
        raise ConfigError(f"metrics.enable_wandb = true: the package wandb is not installed; {remedy}")


@contextlib.contextmanager
def checked_wandb() -> Iterator[ModuleType]:
    """Yields the package; ConfigError for its errors, and if it is to send metrics without an API key."""
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ValueError("no API key is configured")
        yield wandb
    except (wandb.Error, ValueError) as error:  # the latter of settings
        remedy = "run wandb login, set WANDB_API_KEY or WANDB_MODE=offline, or set it to false"
        raise ConfigError(f"metrics.enable_wandb = true: {' '.join(str(error).split())}; {remedy}") from None


def check_metrics_file(folder: Path) -> None:
    """Raises ConfigError if the rows that a run resumes from cannot be read; whether they are rows is not checked."""
    try:
        with open_regular(folder / METRICS_FILE) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return
    except (DocumentError, OSError) as error:
        raise ConfigError(f"{folder / METRICS_FILE} cannot be read: {error}; move it to another folder") from None
    if size > MAX_METRICS_BYTES:
        rule = f"has {size:,} bytes; at most {MAX_METRICS_BYTES:,} are read"
        raise ConfigError(f"{folder / METRICS_FILE} {rule}; move it to another folder")


def _build_sinks(metrics: Metrics, *, file: Path, run_config: dict[str, object]) -> list["Sink"]:
    file.parent.mkdir(parents=True, exist_ok=True)
    tensorboard = [_TensorBoard(file.parent / metrics.save_tb_folder)] if metrics.enable_tensorboard else []
    wandb = [_WeightsAndBiases(file.parent, run_config=run_config)] if metrics.enable_wandb else []
    return [_JsonLines(file), *tensorboard, *wandb]


class _JsonLines:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream = open_to_append(file)

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        """Also drops the incomplete line of a killed process; replaces the file atomically."""
        self.stream.close()
        lines = read_rows(self.file)
        kept = [line for line in lines if (step := _step_of(line)) <= after_step and step not in lost]
        if dropped := len(lines) - len(kept):
            write_atomically(self.file, b"".join(kept))
            logger.info("%s: dropped %s rows of steps that will be repeated", self.file, f"{dropped:,}")

    def write(self, row: Columns) -> None:
        if self.stream.closed or not self.file.exists():  # by forget(), or deleted while training
            self.stream.close()
            self.stream = open_to_append(self.file)
        self.stream.write(json.dumps(row, allow_nan=False) + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()


class _TensorBoard:
    """Writes event files; can drop rows after a step, but not single steps before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resume_step = 0
        self.writer: SummaryWriter | None = None

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        self.close()
        self.writer = None
        self.resume_step = after_step

    def write(self, row: Columns) -> None:
        numbers = _numbers(row)
        step, seconds = int(numbers.pop("step")), numbers.pop("time")
        if self.writer is not None and not self.folder.exists():  # deleted while training
            with contextlib.suppress(OSError):  # its file is gone
                self.writer.close()
            self.writer, self.resume_step = None, step - 1
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes 0.15 s, so after the first step

            self.writer = SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)
        for column, value in numbers.items():
            tag = _tag(column, event=row.get("event"))
            self.writer.add_scalar(tag, value, global_step=step, walltime=seconds)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


_GROUPS = (
    (r"(validation_)?(loss|bits_per_byte)", "loss_metrics"),
    (r".*seconds", "time_metrics"),
    (r".*_per_second|mfu_percent", "throughput"),
    (r"memory_gib", "memory"),
    (r"grad_norm|lr|skipped_steps|clipped_share", "optimizer"),
)
"""Groups of TensorBoard's tags by the names of columns, as torchtitan names them where it has them."""


def _tag(column: str, *, event: Value) -> str:
    """Returns the tag of a column in TensorBoard, which shows what is before a slash as a group."""
    if "/" in column:
        return column
    if isinstance(event, str):
        return f"{event.replace(' ', '_') if re.fullmatch('[a-z ]+', event) else 'events'}/{column}"
    return f"{next((group for pattern, group in _GROUPS if re.fullmatch(pattern, column)), 'progress')}/{column}"


class _WeightsAndBiases:
    """Logs `step` as a column: wandb's own counter cannot decrease, so steps that a resume repeats are logged twice."""

    def __init__(self, folder: Path, *, run_config: dict[str, object]) -> None:
        project = os.environ.get("WANDB_PROJECT", "torchtitan_clone")
        run_id = _wandb_id(folder / "wandb_id")
        options = {"dir": folder, "name": folder.name, "project": project, "config": run_config}
        with checked_wandb() as wandb:
            self.run = wandb.init(id=run_id, resume="allow", **options)
        self.run.define_metric("*", step_metric="step")

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        """Does nothing: rows that were sent cannot be removed."""

    def write(self, row: Columns) -> None:
        numbers = _numbers(row)
        del numbers["time"]  # wandb has its own
        self.run.log(numbers)

    def close(self) -> None:
        self.run.finish()


Sink = _JsonLines | _TensorBoard | _WeightsAndBiases
"""Destination of rows. forget() drops the rows after a step and those of `lost` steps, before the next write()."""


def _wandb_id(file: Path) -> str:
    """Returns the id that an earlier process of the run has written, else a new one."""
    with contextlib.suppress(OSError, DocumentError):
        if _WANDB_ID.fullmatch(content := read_regular(file, max_bytes=64)):
            return content.decode()
    run_id = uuid.uuid4().hex[:16]  # random, since a path would be the same on two machines
    write_atomically(file, run_id.encode())
    return run_id


def _show_bar(total_steps: int, *, done: int, opened: contextlib.ExitStack) -> "tqdm":
    """Shows a progress bar until `opened` closes; log lines are written above it."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    opened.enter_context(logging_redirect_tqdm([logger]))
    bar = tqdm(total=total_steps, initial=done, unit="step", file=sys.stdout, dynamic_ncols=True, leave=False)
    return opened.enter_context(bar)


def _step_of(line: bytes) -> float:
    """Returns the step of a line, or infinity if the line is not a row."""
    try:
        return parse_json(line, where="row").entries()["step"].integer() if line.endswith(b"\n") else math.inf
    except (DocumentError, KeyError):
        return math.inf


def _numbers(row: Columns) -> dict[str, float]:
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if not isinstance(value, bool)}


def _finite(value: Value) -> Value:
    """Returns None for NaN and infinity, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(values: Mapping[str, Value]) -> str:
    texts = (_number(value, 4) if isinstance(value, float) else escape(str(value)) for value in values.values())
    return "".join(f"  {key} {text}" for key, text in zip(values, texts, strict=True))


def _number(value: float, digits: int) -> str:
    """Formats a number with so many digits, a large one without an exponent."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e12 else text


def _step_line(step: int, columns: Mapping[str, float], *, total_steps: int) -> str:
    seconds, speed, skipped = columns["step_seconds"], columns["tokens_per_second"], columns["skipped_steps"]
    auxiliary = {name: value for name, value in columns.items() if name.startswith(AUXILIARY)}
    texts = [
        f"step {step:,}/{total_steps:,}",
        f"loss {columns['loss']:.4f}",
        *(f"{name.removeprefix(AUXILIARY)} {_number(value, 4)}" for name, value in auxiliary.items()),
        f"grad norm {_number(columns['grad_norm'], 3)}",
        f"lr {columns['lr']:.2e}",
        f"{speed:,.0f} tokens/s" if speed >= 100 else f"{speed:.3g} tokens/s",
        format_flops(1e12 * columns["tflops_per_second"]),
        f"MFU {columns['mfu_percent']:.1f} %" if "mfu_percent" in columns else "",
        f"memory {columns['memory_gib']:.2f} GiB",
        f"data wait {columns['data_seconds'] / seconds:.1%}",
        f"ETA {timedelta(seconds=round((total_steps - step) * seconds))}",
        f"skipped {skipped:,}" if skipped else "",
    ]
    return "  ".join(filter(None, texts))
