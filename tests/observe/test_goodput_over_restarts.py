"""The goodput ledger of a run that was killed and resumed accounts for all of its time."""

import signal
import time

import pytest

from torchtitan_clone.observe.goodput import KINDS
from torchtitan_clone.testing.runs import Ranks, losses, options, rows, train, wait_for_step


def test_the_ledger_accounts_for_all_time_over_restarts(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=60, checkpoint__interval=10, checkpoint__last_save_in_hf=True)
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
    assert f"goodput {ledger['goodput_percent']:.1f} %" in output
    assert "over 2 starts" in output
