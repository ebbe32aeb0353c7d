"""Runs from Python, several in one process, as in a notebook: api.py."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.runs import MODEL
from torchtitan_clone import api
from torchtitan_clone.config.environment import STOP_SIGNALS

OPTIONS = {
    "job.run_name": "cell", "training": {"steps": 2, "seq_len": 64, "local_batch_size": 2}, "metrics.log_freq": 1,
    "lr_scheduler.warmup_steps": 1, "data": {"held_out_fraction": 0.1}, "compile.enable": False, "model.args": MODEL,
    "checkpoint.interval": 1000,
}  # fmt: skip


@pytest.fixture
def options(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path) -> dict[str, object]:
    """Returns options of a run in an empty folder, whose processes start sooner."""
    monkeypatch.setattr(sys, "executable", str(python))
    subprocess.run([python, "-m", "this"], stdout=subprocess.DEVNULL, check=True)  # opens what the stand-in keeps open
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus.parent / "api_cache"))
    return OPTIONS | {"training.dataset_path": str(corpus)}


def state_of_process() -> tuple[object, ...]:
    """Returns what a run must leave as it was: handlers of signals, threads, loggers, open files and pipes.

    Without the sockets and threads of the stand-in for Python, and without the one that watches bars of progress.
    """
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    files = sorted(os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    own = [thread.name for thread in threading.enumerate() if not re.search("_answer|_serve|TMonitor", repr(thread))]
    loggers = logging.getLogger("torchtitan_clone").handlers
    return handlers, own, loggers, len([file for file in files if not file.startswith("socket:")])


def wait_for_state(expected: tuple[object, ...]) -> None:
    """The stand-in closes what it was passed a moment after its process has ended."""
    for _ in range(100):
        if state_of_process() == expected:
            return
        time.sleep(0.05)
    assert state_of_process() == expected


FIRST_CELL = """
from torchtitan_clone import api
rows = []
result = api.run(api.configure("debug_model", options=options), on_row=rows.append, show="nothing")
"""
SECOND_CELL = """
longer = api.run(api.configure("debug_model", options=options | {"training.steps": 3}), on_row=rows.append, show="bar")
texts = api.generate(api.open_model(longer.folder), ["import os", "def"], max_new_tokens=4)
"""


def test_cells_of_a_notebook(options: dict[str, object], capfd: pytest.CaptureFixture[str]) -> None:
    cells: dict[str, object] = {"options": options}
    before = state_of_process()
    exec(FIRST_CELL, cells)
    result, rows = cells["result"], cells["rows"]
    assert isinstance(result, api.RunResult)
    assert isinstance(rows, list)
    assert (result.complete, list(result.losses), capfd.readouterr().out) == (True, [1, 2], "")
    assert rows == result.rows
    assert result.checkpoint == Path("outputs/cell/checkpoint/step-2")
    wait_for_state(before)
    exec(SECOND_CELL, cells)
    longer, texts = cells["longer"], cells["texts"]
    assert isinstance(longer, api.RunResult)
    assert (longer.complete, list(longer.losses)) == (True, [1, 2, 3])
    assert {step: longer.losses[step] for step in (1, 2)} == result.losses  # it has resumed
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    assert "3/3" in capfd.readouterr().err
    wait_for_state(before)
    assert not dist.is_initialized()
    assert isinstance(texts, list)
    assert len(texts) == 2


def test_an_interrupt_and_an_error_of_a_callback_leave_a_checkpoint(options: dict[str, object]) -> None:
    config = api.configure("debug_model", options=options | {"training.steps": 100_000})
    before = state_of_process()
    interrupts = iter([signal.SIGINT])

    def interrupt(_: api.Row) -> None:
        for number in interrupts:  # once
            os.kill(os.getpid(), number)

    result = api.run(config, show="nothing", on_row=interrupt)
    assert not result.complete
    assert result.checkpoint is not None

    def fail(row: api.Row) -> None:
        raise LookupError(row["step"])

    with pytest.raises(LookupError, match=rf"^{max(result.losses)}$|^{max(result.losses) + 1}$"):
        api.run(config, show="nothing", on_row=fail)
    wait_for_state(before)
    steps = sorted(int(path.name.removeprefix("step-")) for path in result.checkpoint.parent.glob("step-*"))
    assert steps[-1] > max(result.losses)


def test_what_is_wrong_is_an_exception(options: dict[str, object]) -> None:
    with pytest.raises(api.ConfigError, match=r"options: training\.step: unknown option; did you mean"):
        api.configure("debug_model", options={"training": {"step": 2}})
    with pytest.raises(api.ConfigError, match="did you mean debug_model"):
        api.configure("debug_mode")
    wrong = options | {"optimizer.lr": -1.0, "optimizer.beta1": 2.0}
    with pytest.raises(api.ConfigError) as raised:
        api.run(api.configure("debug_model", options=wrong), show="nothing")
    assert len(raised.value.messages) == 2
    with pytest.raises(api.ConfigError, match="there is no such folder"):
        api.open_model("nowhere")
    with pytest.raises(api.ConfigError, match="device = gpu: must be cpu, cuda or"):
        api.open_model("nowhere", device="gpu")
    with pytest.raises(api.ConfigError, match="takes neither job"):
        api.run(api.configure("debug_model", options={"job.dry_run": True}))
    assert not Path("outputs").exists()


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, torchtitan_clone.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
