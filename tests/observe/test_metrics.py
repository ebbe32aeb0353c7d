"""Rows of metrics, their continuity over a resume, and console output."""

import json
import logging
import math
import os
import pty
import resource
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Metrics
from torchtitan_clone.observe.metrics import MetricsWriter, check_metrics, speed_columns

ROW_KEYS = {
    *(
        "step",
        "loss",
        "grad_norm",
        "clipped",
        "lr",
        "tokens_per_second",
        "tflops_per_second",
        "mfu_percent",
        "step_seconds",
    ),
    *("data_seconds", "tokens_seen", "memory_gib", "skipped_steps", "time"),
}


def writer(
    folder: Path, *, metrics: Metrics | None = None, rank: int = 0, resume_step: int = 0, lost=(), **changes: object
) -> MetricsWriter:
    options = {
        "total_steps": 100,
        "run_config": {"training": {"steps": 100}},
        "environment": {"torch": "2.13"},
        "started": time.time(),
        "ensure_folder": lambda: None,
    }
    built = MetricsWriter(metrics or Metrics(), folder=folder, rank=rank, **options | changes)
    built.start(after_step=resume_step, lost=lost)
    return built


SPEED = {"tokens": 1000, "seconds": 0.5, "flops_per_token": 3e9, "peak_flops": 24e12}


def columns(step: int, *, speed: dict[str, float | None] = SPEED, **changes: float) -> dict[str, float]:
    values = {
        "loss": 5.0 - step / 10,
        "grad_norm": 1.5,
        "clipped": True,
        "lr": 8e-4,
        "tokens_seen": 1000 * step,
        "step_seconds": 0.5,
        "data_seconds": 0.05,
        "memory_gib": 1.25,
        "skipped_steps": 0,
    }
    return values | speed_columns(**speed) | changes


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log_steps(folder: Path, steps: range, **options: object) -> None:
    metrics = writer(folder, **options)
    for step in steps:
        metrics.log(step, columns(step))
    metrics.close()


def test_row_of_a_step(tmp_path):
    log_steps(tmp_path, range(1, 2))
    (row,) = rows(tmp_path)
    assert set(row) == ROW_KEYS
    # 1,000 tokens in 0.5 s; 2,000 tokens/s x 3 GFLOP = 6 TFLOP/s, a quarter of 24.
    assert row["tokens_per_second"] == 2000
    assert row["tflops_per_second"] == pytest.approx(6)
    assert row["mfu_percent"] == pytest.approx(25)


def test_mfu_is_omitted_if_the_peak_is_unknown(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        writer(tmp_path).log(1, columns(1, speed=SPEED | {"peak_flops": None}))
    assert set(rows(tmp_path)[0]) == ROW_KEYS - {"mfu_percent"}
    assert "MFU" not in caplog.text


def test_console_line_of_a_step(tmp_path, caplog):
    metrics = writer(tmp_path)
    with caplog.at_level(logging.INFO):
        metrics.log(20, columns(20, skipped_steps=2))
    assert caplog.messages == [
        "step 20/100  loss 3.0000  grad norm 1.5  lr 8.00e-04  2,000 tokens/s  6 TFLOP/s  MFU 25.0 %  "
        "memory 1.25 GiB  data wait 10.0%  ETA 0:00:40  skipped 2"
    ]


def test_auxiliary_losses_are_columns_by_name(tmp_path, caplog):
    metrics = writer(tmp_path, metrics=Metrics(enable_tensorboard=True))
    with caplog.at_level(logging.INFO):
        metrics.log(1, columns(1, **{"auxiliary/load_balance": 0.01, "auxiliary/z_loss": 0.25}))
    metrics.close()
    (row,) = rows(tmp_path)
    assert set(row) == ROW_KEYS | {"auxiliary/load_balance", "auxiliary/z_loss"}
    assert (row["auxiliary/load_balance"], row["auxiliary/z_loss"]) == (0.01, 0.25)
    assert tensorboard_steps(tmp_path / "tb", "auxiliary/z_loss") == [1]
    assert "loss 4.9000  load_balance 0.01  z_loss 0.25  grad norm" in caplog.messages[0]


def test_times_are_means_over_the_steps_since_the_last_row(tmp_path):
    metrics = writer(tmp_path)

    def log(step: int) -> None:
        step_seconds, data_seconds = metrics.mean_seconds()
        metrics.log(step, columns(step, step_seconds=step_seconds, data_seconds=data_seconds))

    metrics.observe_step(1, data_seconds=100.0, by_source={})
    before = time.perf_counter()
    metrics.restart_interval()
    started = time.perf_counter()
    for step, data_seconds in enumerate((0.25, 0.5, 0.75, 1.0), start=2):
        metrics.observe_step(step, data_seconds=data_seconds, by_source={})
    ended = time.perf_counter()
    log(5)
    after = time.perf_counter()
    metrics.observe_step(6, data_seconds=2.0, by_source={})
    log(6)
    first, second = rows(tmp_path)
    assert ended - started <= 4 * first["step_seconds"] <= after - before
    assert first["data_seconds"] == 0.625
    assert second["data_seconds"] == 2.0


def test_losses_by_source_are_means_over_the_steps_since_the_last_row(tmp_path):
    """Also over those before a save or a validation; not over steps that were skipped or rolled back."""
    metrics = writer(tmp_path)
    metrics.observe_step(1, data_seconds=0.0, by_source={"web": (2.0, 1, 1)})
    metrics.restart_interval()
    metrics.observe_step(2, data_seconds=0.0, by_source={})
    metrics.observe_step(3, data_seconds=0.0, by_source={"web": (50.0, 1, 1)})
    metrics.forget(after_step=2)
    metrics.observe_step(3, data_seconds=0.0, by_source={"web": (7.0, 2, 1), "code": (1.0, 1, 1)})
    metrics.log(3, columns(3))
    metrics.observe_step(4, data_seconds=0.0, by_source={"web": (5.0, 1, 1)})
    metrics.log(4, columns(4))
    found = [{key: row[key] for key in row if key.startswith("loss/")} for row in rows(tmp_path)]
    assert found == [{"loss/web": 3.0, "loss/code": 1.0}, {"loss/web": 5.0}]


def test_other_ranks_write_nothing(tmp_path):
    folder = tmp_path / "run"
    log_steps(folder, range(1, 3), rank=1, metrics=Metrics(enable_tensorboard=True, enable_wandb=True))
    assert not folder.exists()


def test_validation_and_event_rows(tmp_path, caplog):
    metrics = writer(tmp_path)
    with caplog.at_level(logging.INFO):
        metrics.log_validation(10, 2.5, validation_tokens=4096)
        metrics.log_event(10, "checkpoint saved", save_seconds=0.25)
    validation, event = rows(tmp_path)
    assert validation | {"time": 0} == {"step": 10, "validation_loss": 2.5, "validation_tokens": 4096, "time": 0}
    assert event | {"time": 0} == {"step": 10, "event": "checkpoint saved", "save_seconds": 0.25, "time": 0}
    assert caplog.messages == [
        "step 10  validation loss 2.5000  validation_tokens 4096",
        "step 10  checkpoint saved  save_seconds 0.25",
    ]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_non_finite_values_are_null(tmp_path, loss):
    metrics = writer(tmp_path)
    metrics.log(1, columns(1, loss=loss, grad_norm=loss))
    (row,) = rows(tmp_path)
    assert row["loss"] is None
    assert row["grad_norm"] is None


def test_resume_continues_the_rows(tmp_path):
    log_steps(tmp_path, range(1, 9))
    log_steps(tmp_path, range(6, 11), resume_step=5)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 11))


def test_rows_of_repeated_and_rolled_back_steps_are_dropped(tmp_path):
    log_steps(tmp_path, range(1, 9))
    metrics = writer(tmp_path, resume_step=20, lost={7, 8})
    for step in (21, 22, 23):
        metrics.log(step, columns(step))
    metrics.forget(after_step=21)
    metrics.forget(after_step=21)
    metrics.log(22, columns(22, loss=1.0))
    metrics.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 21, 22]
    assert rows(tmp_path)[-1]["loss"] == 1.0


def test_resume_drops_the_incomplete_line_of_a_killed_process(tmp_path):
    program = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_metrics import columns, writer
from pathlib import Path
metrics = writer(Path({str(tmp_path)!r}))
for step in range(1, 4):
    metrics.log(step, columns(step))
metrics.sinks[0].stream.write('{{"step": 3, "lo')
metrics.sinks[0].stream.flush()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert (tmp_path / "metrics.jsonl").read_text().endswith('"lo')
    log_steps(tmp_path, range(4, 6), resume_step=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "starts.jsonl"]


def test_full_disk_loses_rows_but_not_the_run(tmp_path):
    """A file size limit simulates the full disk."""
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_metrics import columns, writer
from pathlib import Path
from torchtitan_clone.observe.logging import setup_logging
setup_logging(rank=0, color=False)
metrics = writer(Path({str(tmp_path)!r}))
for step, size in ((1, 10_000), (2, 300), (3, 10_000)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    metrics.log(step, columns(step))
metrics.close()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.count("WARNING [rank 0] metrics cannot be written: [Errno 27] File too large") == 1
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_a_full_disk_keeps_rows_but_does_not_stop_a_resume(tmp_path, caplog):
    log_steps(tmp_path, range(1, 6))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        metrics = writer(tmp_path, resume_step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "metrics cannot be written: [Errno 27] File too large" in caplog.text
    assert "dropped" not in caplog.text
    metrics.log(3, columns(3))
    metrics.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 3]


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars(tag)]


def test_tensorboard_curve_is_continuous_after_a_resume(tmp_path):
    metrics = Metrics(enable_tensorboard=True)
    log_steps(tmp_path, range(1, 9), metrics=metrics)
    log_steps(tmp_path, range(6, 11), metrics=metrics, resume_step=5)
    assert tensorboard_steps(tmp_path / "tb", "loss_metrics/loss") == list(range(1, 11))
    assert tensorboard_steps(tmp_path / "tb", "throughput/mfu_percent") == list(range(1, 11))


def test_every_tag_of_tensorboard_is_in_a_group(tmp_path):
    metrics = writer(tmp_path, metrics=Metrics(enable_tensorboard=True))
    metrics.log(1, columns(1, **{"auxiliary/z_loss": 0.25}, skipped_steps=1))
    metrics.log_validation(1, 2.5, bits_per_byte=1.1, seconds=2.0)
    metrics.log_event(1, "checkpoint saved", seconds=3.0)
    metrics.log_event(1, "mesh pp 2 x tp 1", seconds=3.0)
    metrics.log_goodput(1)
    metrics.close()
    accumulator = EventAccumulator(str(tmp_path / "tb"))
    accumulator.Reload()
    groups = {}
    for tag in accumulator.Tags()["scalars"]:
        group, _, name = tag.partition("/")
        groups.setdefault(group, set()).add(name)
    assert groups.pop("goodput")
    assert groups == {
        "auxiliary": {"z_loss"},
        "checkpoint_saved": {"seconds"},
        "events": {"seconds"},
        "loss_metrics": {"loss", "validation_loss", "bits_per_byte"},
        "memory": {"memory_gib"},
        "optimizer": {"grad_norm", "lr", "skipped_steps"},
        "progress": {"tokens_seen"},
        "throughput": {"tokens_per_second", "tflops_per_second", "mfu_percent"},
        "time_metrics": {"seconds", "step_seconds", "data_seconds"},
    }


@pytest.mark.parametrize(
    ("tokens_per_step", "flops_per_token", "norm", "shown"),
    [
        (10, 3.84e6, 1234.5, "grad norm 1,234  lr 8.00e-04  20 tokens/s  76.8 MFLOP/s"),
        (1, 7.7e4, 2e-5, "grad norm 2e-05  lr 8.00e-04  2 tokens/s  154 kFLOP/s"),
        (10**7, 2.4e12, math.inf, "grad norm inf  lr 8.00e-04  20,000,000 tokens/s  48 EFLOP/s"),
        (1000, 4.999e8, 1.5, "grad norm 1.5  lr 8.00e-04  2,000 tokens/s  1 TFLOP/s"),
    ],
)
def test_numbers_of_a_line_have_units_in_which_they_can_be_read(
    tmp_path, caplog, tokens_per_step, flops_per_token, norm, shown
):
    metrics = writer(tmp_path)
    speed = {"tokens": tokens_per_step, "seconds": 0.5, "flops_per_token": flops_per_token, "peak_flops": None}
    with caplog.at_level(logging.INFO):
        metrics.log(1, columns(1, speed=speed, grad_norm=norm))
        metrics.log_event(1, "weights exported", seconds=12345.6, size_gib=0.25)
    assert f"{shown}  memory" in caplog.messages[0]
    assert caplog.messages[1] == "step 1  weights exported  seconds 12,346  size_gib 0.25"


def test_tensorboard_is_imported_at_the_first_row(tmp_path):
    program = f"""
import sys
import time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from torchtitan_clone.config.schema import Metrics
from torchtitan_clone.observe.metrics import MetricsWriter
MetricsWriter(Metrics(enable_tensorboard=True), folder=Path({str(tmp_path)!r}), rank=0, total_steps=1,
              run_config={{}}, environment={{}}, started=0.0, ensure_folder=lambda: None).start(after_step=0)
print([name for name in ("torch", "tensorboard", "wandb", "tqdm") if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_missing_wandb_names_its_requirement(monkeypatch):
    check_metrics(Metrics())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'enable_wandb.*not installed.*"wandb>=0\.31"'):
        check_metrics(Metrics(enable_wandb=True))


def test_wandb_keeps_its_id_over_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    metrics = Metrics(enable_wandb=True)
    ids = []
    for resume_step in (0, 5):
        run = writer(tmp_path, metrics=metrics, resume_step=resume_step)
        ids.append(run.sinks[1].run.id)
        run.log(resume_step + 1, columns(resume_step + 1))
        run.close()
    assert ids == [(tmp_path / "wandb_id").read_text()] * 2
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))) == 2


PROGRAM_OF_A_START = """
import sys
from pathlib import Path
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Metrics
from torchtitan_clone.observe.metrics import checked_wandb
sys.path.insert(0, {tests!r})
from test_metrics import writer
try:
    with checked_wandb():
        pass
    if {starts}:
        writer(Path({folder!r}), metrics=Metrics(enable_wandb=True)).close()
except ConfigError as error:
    print("error:", error)
"""


def start_with_wandb(folder: Path, *, starts: bool = False, **env: str) -> str:
    """Returns what a process without the user's keys prints."""
    home = {"PATH": os.environ["PATH"], "HOME": str(folder), "NETRC": str(folder / "none"), "WANDB_DIR": str(folder)}
    program = PROGRAM_OF_A_START.format(tests=str(Path(__file__).parent), folder=str(folder), starts=starts)
    run = subprocess.run([sys.executable, "-c", program], env=home | env, capture_output=True, text=True, check=True)
    return run.stdout


def test_wandb_without_a_usable_key_is_an_error_unless_it_is_offline(tmp_path):
    pytest.importorskip("wandb")
    assert "error: metrics.enable_wandb = true: no API key is configured; run wandb login" in start_with_wandb(tmp_path)
    assert "error: metrics.enable_wandb = true: WANDB_API_KEY invalid" in start_with_wandb(tmp_path, WANDB_API_KEY="ab")
    assert "error: metrics.enable_wandb = true: 1 validation err" in start_with_wandb(tmp_path, WANDB_MODE="of")
    for mode in ("offline", "disabled"):
        assert "error: " not in start_with_wandb(tmp_path, WANDB_MODE=mode, starts=True)
    output = start_with_wandb(tmp_path, WANDB_MODE="offline", WANDB_PROJECT="a/b", starts=True)
    assert "error: metrics.enable_wandb = true: Invalid project name" in output


def run_on_a_terminal(program: str) -> str:
    """Returns what a Python program prints on a terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 200))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=slave, stderr=slave)
    os.close(slave)
    received = b""
    while chunk := _read(master):
        received += chunk
    os.close(master)
    assert process.wait() == 0
    return received.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports a closed terminal as an error
        return b""


PROGRAM = """
import sys
import time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_metrics import columns, writer
from torchtitan_clone.observe.logging import setup_logging
setup_logging(rank=0, color=False)
metrics = writer(Path({folder!r}), total_steps=6)
for step in range(1, 7):
    metrics.progress(step)
    if step % 2 == 0:
        metrics.log(step, columns(step))
metrics.close()
"""


def test_progress_bar_is_shown_only_on_a_terminal(tmp_path):
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.split("  ")[0].split(" ", 2)[2] for line in piped.stdout.splitlines()] == [
        "step 2/6",
        "step 4/6",
        "step 6/6",
    ]
    assert piped.stderr == ""
    (tmp_path / "metrics.jsonl").unlink()
    shown = run_on_a_terminal(program)
    assert "6/6 [" in shown
    lines = [line.rsplit("\r", 1)[-1] for line in shown.split("\r\n")]
    assert [line.split("  ")[0].split(" ", 2)[2] for line in lines if "loss" in line] == [
        "step 2/6",
        "step 4/6",
        "step 6/6",
    ]
