"""Goodput over restarts."""

import json
import re
import signal
import time

import pytest
import torch

from tests.support.runs import Ranks, losses, options, read_json_lines, rows, train, wait_for_step
from torchtitan_clone.config.schema import Metrics
from torchtitan_clone.observe.goodput import EVENT, KINDS, Ledger, describe_goodput, resumed_ledger
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.observe.records import STARTS_FILE


def write_rows(file, *rows: dict) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def goodput_row(*, step: int, time: float, progress: float, complete: bool = False) -> dict:
    seconds = {f"{kind}_seconds": 0.0 for kind in KINDS}
    counts = {"starts": 1, "steps_thrown_away": 0}
    row = {"step": step, "event": EVENT, "complete": complete, "goodput_percent": 100.0, "progress_seconds": progress}
    return row | seconds | counts | {"time": time}


def test_ledger_books_time_that_is_not_progress():
    ledger = Ledger(started=time.time() - 107)
    assert ledger.row()["progress_seconds"] == 0
    ledger.book("start_up", 7)
    ledger.book("saving", 20)
    ledger.throw_away(steps=3, seconds=30)
    row = ledger.row()
    assert (row["saving_seconds"], row["thrown_away_seconds"], row["steps_thrown_away"]) == (20, 30, 3)
    assert row["progress_seconds"] + 50 >= 100
    assert row["goodput_percent"] == pytest.approx(100 * row["progress_seconds"] / (row["progress_seconds"] + 57))
    assert "over 1 start;" in describe_goodput(row)


def test_new_run_starts_an_empty_ledger(tmp_path):
    row = resumed_ledger(tmp_path / "metrics.jsonl", resume_step=0, lost=0, started=time.time()).row()
    assert (row["starts"], row["steps_thrown_away"], row["waiting_seconds"]) == (1, 0, 0)


def test_resume_books_repeated_steps_and_the_downtime(tmp_path):
    """Step 10 was saved at 1,000 s, step 20 logged at 1,100 s, the process killed, the next started at 1,150 s."""
    file = tmp_path / "metrics.jsonl"
    write_rows(
        file,
        goodput_row(step=10, time=1000.0, progress=80.0),
        {"step": 20, "loss": 1.0, "time": 1100.0},
    )
    with file.open("a") as stream:
        stream.write('{"step": 21, "lo')  # incomplete line of the killed process
    row = resumed_ledger(file, resume_step=15, lost=0, started=1150.0).row()
    assert (row["starts"], row["steps_thrown_away"]) == (2, 5)
    assert row["thrown_away_seconds"] == 50.0  # 5 of 10 steps in 100 s
    assert row["waiting_seconds"] == 50.0


def test_lost_checkpoint_turns_earlier_progress_into_repeated_steps(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_rows(file, goodput_row(step=10, time=1000.0, progress=80.0), {"step": 20, "loss": 1.0, "time": 1100.0})
    row = resumed_ledger(file, resume_step=5, lost=0, started=1100.0).row()
    assert row["steps_thrown_away"] == 15
    assert row["thrown_away_seconds"] == 100.0 + 40.0  # all since the save, and 5 of the 10 saved steps


def test_a_process_that_dies_before_its_first_step_forgets_nothing(tmp_path):
    """The rows of the steps that are repeated are dropped when it starts."""
    write_rows(
        tmp_path / "metrics.jsonl",
        goodput_row(step=10, time=1000.0, progress=80.0),
        {"step": 20, "loss": 1.0, "time": 1100.0},
    )
    found = []
    for started in (1150.0, time.time()):
        metrics = MetricsWriter(
            Metrics(), folder=tmp_path, rank=0, total_steps=100, run_config={}, environment={}, started=started,
            ensure_folder=lambda: None,
        )  # fmt: skip
        metrics.start(after_step=15)
        metrics.close()
        found.append(read_json_lines(tmp_path / "metrics.jsonl")[-1])
    before, now = found
    assert [row["starts"] for row in found] == [2, 3]
    assert before["start_up_seconds"] == pytest.approx(time.time() - 1150, abs=60)
    for name in ("steps_thrown_away", "thrown_away_seconds", "progress_seconds"):
        assert now[name] == before[name] > 0


def test_time_after_a_complete_run_is_not_waiting(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_rows(file, goodput_row(step=10, time=1000.0, progress=80.0, complete=True))
    assert resumed_ledger(file, resume_step=10, lost=0, started=5000.0).row()["waiting_seconds"] == 0


def test_the_ledger_accounts_for_all_time_over_restarts(corpus, tmp_path):
    sizes = {"training__steps": 40, "training__seq_len": 32, "model__args__n_layers": 1}
    argv = options(corpus, tmp_path, checkpoint__interval=10, checkpoint__last_save_in_hf=True, **sizes)
    start = time.time()
    run = Ranks(argv, world_size=2, log_folder=tmp_path)
    wait_for_step(tmp_path, 15)
    run.signal(signal.SIGKILL)
    run.join()
    killed_after = max(losses(tmp_path))
    first_row, *_, last_row = rows(tmp_path)
    killed = time.time()
    time.sleep(1.5)
    restarted = time.time()
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    end = time.time()
    assert code == 0
    ledger = [row for row in rows(tmp_path) if row.get("event") == "goodput"][-1]
    assert ledger["complete"]
    assert ledger["starts"] == 2
    assert ledger["steps_thrown_away"] == killed_after - killed_after // 10 * 10
    assert restarted - killed < ledger["waiting_seconds"] < end - last_row["time"]
    assert ledger["start_up_seconds"] > 0.1
    blocked = {"checkpoint saved": "blocked_seconds", "weights exported": "seconds"}
    saving = [row[blocked[row["event"]]] for row in rows(tmp_path) if row.get("event") in blocked]
    assert ledger["saving_seconds"] == pytest.approx(sum(saving), rel=0.01)
    total = ledger["progress_seconds"] + sum(ledger[f"{kind}_seconds"] for kind in KINDS)
    assert ledger["time"] - first_row["time"] < total < end - start
    assert ledger["goodput_percent"] == pytest.approx(100 * ledger["progress_seconds"] / total)
    (shown,) = re.findall(r"goodput ([\d.]+) %", output)
    assert shown == f"{ledger['goodput_percent']:.1f}"
    assert "over 2 starts" in output
    first, second = read_json_lines(tmp_path / "run" / STARTS_FILE)
    assert (first["after_step"], first["was_complete"], "last_step" in first) == (0, False, False)
    assert (second["after_step"], second["last_step"]) == (killed_after // 10 * 10, killed_after)
    assert second["last_time"] == last_row["time"] < killed < restarted - 1 < second["time"]
    assert (second["ranks"], second["device"], second["torch"]) == (2, "cpu", torch.__version__)
