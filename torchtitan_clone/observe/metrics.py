"""What a run measures, step by step: a line on the console, a row of metrics.jsonl, TensorBoard, Weights & Biases.

A row is a flat dict with the key `step`; rates and sums are over all ranks. Only rank 0 shows and writes. Where the run
goes on after step k the rows after k are dropped, so that its record stays one curve.
"""

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Metrics
from torchtitan_clone.observe.goodput import EVENT, Ledger, resumed_ledger
from torchtitan_clone.observe.logging import logger

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What the trainer knows after a logged step; the times are means over the steps since the last record."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Mean over the target tokens of the global batch, in nats."""
    grad_norm: float
    """Global norm of the gradients before they are clipped."""
    lr: float
    tokens_seen: int
    """Tokens of all ranks since step 1 of the run."""
    step_seconds: float
    data_seconds: float
    """Part of step_seconds in which the step waited for its batch."""
    memory_gib: float
    """Most device memory in use on this rank since the last record; on the CPU, of the process."""
    skipped_steps: int
    """Steps of the run that were skipped for a non-finite loss or gradient norm."""


class Sink(Protocol):
    """A place that takes rows."""

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        """Drop the rows of later steps, and of those that were lost; called before the first row."""
        ...

    def write(self, row: Row) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Bring what was taken to safety."""
        ...


class MetricsWriter:
    """Turns records into rows and hands them to every sink; on ranks other than 0 it does nothing."""

    def __init__(
        self,
        sinks: list[Sink],
        *,
        active: bool,
        file: Path,
        started: float,
        total_steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
    ) -> None:
        self.sinks = sinks
        self.ledger = Ledger(started=started)
        self.active = active
        self._file, self._started = file, started
        self._newest_step = 0
        self.total_steps = total_steps
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.bar: _ProgressBar | None = None

    def start(self, *, after_step: int, lost: Collection[int] = ()) -> None:
        """The run goes on after this step, and without those of its own that others have trained again; once."""
        if not self.active:
            return
        self.ledger = resumed_ledger(self._file, resume_step=after_step, lost=len(lost), started=self._started)
        self._forget(after_step, lost)
        if sys.stdout.isatty():
            self.bar = _ProgressBar(self.total_steps, done=after_step)

    def forget(self, *, after_step: int, lost: Collection[int] = ()) -> None:
        """Drop what was written of later steps, and of those that were lost; cheap where there is nothing."""
        if self.active and (lost or self._newest_step > after_step):
            self._forget(after_step, lost)

    def _forget(self, after_step: int, lost: Collection[int]) -> None:
        self._newest_step = after_step
        for sink in self.sinks:
            sink.forget(after_step=after_step, lost=lost)

    def log(self, record: StepRecord) -> None:
        """Show and write a training step."""
        if self.active:
            row = asdict(record) | self._rates(record)
            logger.info(_step_line(row, total_steps=self.total_steps))
            self._write(row)

    def log_validation(self, step: int, loss: float, **values: float) -> None:
        """Show and write a validation after `step`; `values` are further columns, with their unit in the name."""
        if self.active:
            logger.info("step %s  validation loss %.4f%s", f"{step:,}", loss, _named(values))
            self._write({"step": step, "validation_loss": loss} | values)

    def log_event(self, step: int, name: str, **values: Any) -> None:
        """Show and write something else that happened at `step`, for example a save and its seconds."""
        if self.active:
            logger.info("step %s  %s%s", f"{step:,}", name, _named(values))
            self._write({"step": step, "event": name} | values)

    def log_goodput(self, step: int, *, complete: bool = False) -> None:
        """Write what the time went into so far; `complete` where the run has done all its steps."""
        if self.active:
            self._write({"step": step, "event": EVENT, "complete": complete} | self.ledger.row())

    def progress(self, step: int) -> None:
        """Move the progress bar, where there is one; cheap enough for every step."""
        if self.bar:
            self.bar.move_to(step)

    def close(self) -> None:
        """Finish what is still being written."""
        if self.bar:
            self.bar.close()
        for sink in self.sinks:
            _unless_disk_fails(sink.close)

    def _rates(self, record: StepRecord) -> Row:
        tokens_per_second = self.tokens_per_step / record.step_seconds
        flops_per_second = tokens_per_second * self.flops_per_token
        rates = {"tokens_per_second": tokens_per_second, "tflops_per_second": flops_per_second / 1e12}
        if self.peak_flops is not None:
            rates["mfu_percent"] = 100 * flops_per_second / self.peak_flops
        return rates

    def _write(self, row: Row) -> None:
        row = {key: _finite(value) for key, value in row.items()} | {"time": time.time()}
        self._newest_step = max(self._newest_step, row["step"])
        for sink in self.sinks:
            _unless_disk_fails(sink.write, row)


def build_metrics(
    metrics: Metrics,
    *,
    folder: Path,
    rank: int,
    total_steps: int,
    tokens_per_step: int,
    flops_per_token: float,
    peak_flops: float | None,
    run_config: dict[str, Any],
    started: float,
) -> MetricsWriter:
    """The writer of a run in its `folder`; `start` it before the first row.

    flops_per_token and tokens_per_step are those of the whole model and the global batch; peak_flops is of all devices
    together, None where it is unknown, and then no MFU is shown. run_config goes to Weights & Biases. `started` is when
    this process began, in seconds since the epoch.
    """
    file = folder / "metrics.jsonl"
    return MetricsWriter(
        _build_sinks(metrics, file=file, run_config=run_config) if rank == 0 else [],
        active=rank == 0,
        file=file,
        started=started,
        total_steps=total_steps,
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token,
        peak_flops=peak_flops,
    )


def _build_sinks(metrics: Metrics, *, file: Path, run_config: dict[str, Any]) -> list[Sink]:
    if metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            'metrics.enable_wandb: the package wandb is not installed; pip install "torchtitan_clone[wandb]", '
            "or set it to false"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [_JsonLines(file)]
    if metrics.enable_tensorboard:
        sinks.append(_TensorBoard(file.parent / metrics.save_tb_folder))
    if metrics.enable_wandb:
        sinks.append(_WeightsAndBiases(file.parent, run_config=run_config))
    return sinks


class _JsonLines:
    """One JSON object per line, written through to the operating system at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream = file.open("a", encoding="utf-8")

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        self.stream.close()
        _drop_rows(self.file, after_step=after_step, lost=lost)
        self.stream = self.file.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        self.stream.write(json.dumps(row, allow_nan=False) + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()


class _TensorBoard:
    """Event files; tensorboard is imported at the first row (0.15 s), behind the first step.

    Of rows written earlier it can drop those of the last steps only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.resume_step = folder, 0
        self.writer: Any = None

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        self.close()
        self.writer, self.resume_step = None, after_step

    def write(self, row: Row) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)
        for key, value in _numbers(row).items():
            self.writer.add_scalar(key, value, global_step=row["step"], walltime=row["time"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class _WeightsAndBiases:
    """A Weights & Biases run, found again through the id that lies in the run's folder.

    `step` is a column of ours and not wandb's own counter, which refuses to go back: steps that a resume repeats are
    logged twice, at the same place of the curve.
    """

    def __init__(self, folder: Path, *, run_config: dict[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self.run = wandb.init(
            id=_wandb_id(folder / "wandb_id"),
            resume="allow",
            dir=folder,
            name=folder.name,
            project=os.environ.get("WANDB_PROJECT", "torchtitan_clone"),
            config=run_config,
        )
        self.run.define_metric("*", step_metric="step")

    def forget(self, *, after_step: int, lost: Collection[int]) -> None:
        """What is sent is sent."""

    def write(self, row: Row) -> None:
        self.run.log(_numbers(row) | {"step": row["step"]})

    def close(self) -> None:
        self.run.finish()


class _ProgressBar:
    """A bar below the log; while it is there, the log's lines are written above it."""

    def __init__(self, total_steps: int, *, done: int) -> None:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self.redirection = contextlib.ExitStack()
        self.redirection.enter_context(logging_redirect_tqdm([logger]))
        self.bar = tqdm(total=total_steps, initial=done, unit="step", file=sys.stdout, dynamic_ncols=True, leave=False)

    def move_to(self, step: int) -> None:
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        self.bar.close()
        self.redirection.close()


def _unless_disk_fails(write: Callable[..., None], *row: Row) -> None:
    """A full disk costs rows of the record, not the training."""
    try:
        write(*row)
    except OSError as error:
        logger.warning("metrics cannot be written: %s", error)


def _drop_rows(file: Path, *, after_step: int, lost: Collection[int]) -> None:
    """Drop rows, and the torn line of a killed process; the file is replaced in one go."""
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if (step := _step_of(line)) <= after_step and step not in lost]
    if len(kept) == len(lines):
        return
    count = len(lines) - len(kept)
    logger.info("%s: dropped %s rows of steps that are trained again", file, f"{count:,}")
    replacement = file.with_suffix(".jsonl.new")
    with replacement.open("wb") as stream:
        stream.writelines(kept)
        stream.flush()
        os.fsync(stream.fileno())
    replacement.replace(file)


def _step_of(line: bytes) -> float:
    """Infinity for a line that is no row."""
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _wandb_id(file: Path) -> str:
    """Drawn once per run folder: a path would be the same on two machines."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:16])
    return file.read_text()


def _finite(value: Any) -> Any:
    """None for what JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(row: Row) -> Row:
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "time")
    }


def _named(values: Row) -> str:
    shown = (f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in values.values())
    return "".join(f"  {key} {value}" for key, value in zip(values, shown, strict=True))


def _step_line(row: Row, *, total_steps: int) -> str:
    seconds_left = (total_steps - row["step"]) * row["step_seconds"]
    parts = [
        f"step {row['step']:,}/{total_steps:,}",
        f"loss {row['loss']:.4f}",
        f"grad norm {row['grad_norm']:.3g}",
        f"lr {row['lr']:.2e}",
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"{row['tflops_per_second']:.3g} TFLOP/s",
        f"MFU {row['mfu_percent']:.1f} %" if "mfu_percent" in row else "",
        f"memory {row['memory_gib']:.2f} GiB",
        f"data wait {row['data_seconds'] / row['step_seconds']:.1%}",
        f"ETA {timedelta(seconds=round(seconds_left))}",
        f"skipped {row['skipped_steps']:,}" if row["skipped_steps"] else "",
    ]
    return "  ".join(filter(None, parts))
