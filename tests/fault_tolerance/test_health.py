"""A rank that hangs and a rank that is slow are found and named; the ledger adds up over restarts."""

import json
import os
import signal
import time

import pytest

from tests.harness import run_ranks
from tests.runs import Ranks, losses, options, rows, train, train_rank, wait_for_step
from torchtitan_clone.fault_tolerance.health import StepParts, describe_stragglers
from torchtitan_clone.observe.goodput import KINDS


def rank_that_is_disturbed(argv, logs, disturb):
    """A rank in which `disturb` runs before every forward of the norm."""
    from torchtitan_clone import trainer

    build = trainer.build_parts

    def disturbed(*args, **kwargs):
        parts = build(*args, **kwargs)
        parts[0].norm.register_forward_pre_hook(lambda *_: disturb(int(os.environ["RANK"])))
        return parts

    trainer.build_parts = disturbed
    return train_rank(argv, logs)


def slow_rank_1(rank):
    if rank == 1:
        time.sleep(0.5)


def hang_of_rank_1(rank, passes=[0]):  # noqa: B006
    passes[0] += 1
    if rank == 1 and passes[0] == 5:
        time.sleep(600)


def test_a_slow_rank_is_named_with_its_part(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=4, comm__straggler_freq=2)
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    assert run_ranks(rank_that_is_disturbed, 2, argv, logs, slow_rank_1) == [0, 0]
    output = logs[0].read_text()
    assert output.count("is slow in computation") == 2
    assert "step 2: rank 1 (" in output
    assert "rank 0 (" not in output


def test_looking_for_slow_ranks_changes_no_bit(corpus, tmp_path):
    for name, freq in (("off", 0), ("on", 1)):
        argv = options(corpus, tmp_path / name, comm__straggler_freq=freq)
        assert train(argv, world_size=2, log_folder=tmp_path)[0] == 0
    assert losses(tmp_path / "on") == losses(tmp_path / "off")


def test_ranks_that_are_alike_are_not_called_slow():
    def parts(computation, data=0.01):
        return StepParts(host="h", data=data, computation=computation, communication=1.2 - computation)

    assert describe_stragglers([parts(1.0), parts(1.1), parts(0.9)]) == []
    assert describe_stragglers([parts(0.1), parts(0.1), parts(0.1, data=0.05)]) == []
    (line,) = describe_stragglers([parts(0.5), parts(0.5), parts(1.0)])
    assert line == "rank 2 (h) is slow in computation: 1.000 s, median 0.500 s, step 1.210 s"
    (line,) = describe_stragglers([parts(0.5), parts(0.5, data=0.9), parts(0.5)])
    assert line.startswith("rank 1 (h) is slow in data")


@pytest.mark.parametrize("resumed", [False, True])
def test_a_hang_is_reported_by_all_ranks_and_ends_the_run(corpus, tmp_path, resumed):
    if resumed:
        assert train(options(corpus, tmp_path, training__steps=2), world_size=2, log_folder=tmp_path)[0] == 0
    changes = {"comm__train_timeout_seconds": 4, "comm__init_timeout_seconds": 60}
    argv = options(corpus, tmp_path, training__steps=50, **changes)
    logs = [tmp_path / f"hung.rank{rank}.log" for rank in range(2)]
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"Timed out|Connection closed|timed out"):
        run_ranks(rank_that_is_disturbed, 2, argv, logs, hang_of_rank_1)
    assert time.monotonic() - start < 40
    reports = tmp_path / "run" / "comm_traces"
    assert "hang_of_rank_1" in (reports / "rank1_stacks.txt").read_text()
    assert "train_step" in (reports / "rank0_stacks.txt").read_text()
    for rank in (0, 1):
        assert json.loads((reports / f"rank{rank}_collectives.json").read_text())["entries"]
        assert "nothing has moved for 4 s" in logs[rank].read_text()


def test_the_ledger_accounts_for_all_time_over_restarts(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=60, checkpoint__interval=10)
    start = time.time()
    run = Ranks(argv, world_size=2, log_folder=tmp_path)
    wait_for_step(tmp_path, 15)
    run.signal(signal.SIGKILL)
    run.join()
    killed_after = max(losses(tmp_path))
    time.sleep(1.5)
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    end = time.time()
    assert code == 0
    ledger = [row for row in rows(tmp_path) if row.get("event") == "goodput"][-1]
    assert ledger["complete"]
    assert ledger["starts"] == 2
    assert ledger["steps_thrown_away"] == killed_after - killed_after // 10 * 10
    assert 1.5 < ledger["waiting_seconds"] < 10
    assert ledger["start_up_seconds"] > 0.1
    assert ledger["saving_seconds"] == pytest.approx(
        sum(row["blocked_seconds"] for row in rows(tmp_path) if row.get("event") == "checkpoint saved"), rel=0.01
    )
    total = ledger["progress_seconds"] + sum(ledger[f"{kind}_seconds"] for kind in KINDS)
    assert end - start - 3 < total < end - start
    assert ledger["goodput_percent"] == pytest.approx(100 * ledger["progress_seconds"] / total)
    assert f"goodput {ledger['goodput_percent']:.1f} %" in output
    assert "over 2 starts" in output
