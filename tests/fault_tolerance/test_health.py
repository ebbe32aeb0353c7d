"""A rank that hangs and a rank that is slow are found and named; the ledger adds up over restarts."""

import json
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from torchtitan_clone.fault_tolerance.health import StepBreakdown, describe_slow_links, describe_stragglers
from torchtitan_clone.observe.goodput import KINDS
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import Ranks, losses, options, rows, train, train_rank, wait_for_step


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


def rank_that_sends_late(argv, logs):
    """A rank whose forward takes longer, or whose links do."""
    transfer, rank = dist.batch_isend_irecv, int(os.environ["RANK"])

    def late(operations):
        time.sleep(0.06 * (rank == 2 and operations[0].op is dist.isend))
        return transfer(operations)

    dist.batch_isend_irecv = late
    return rank_that_is_disturbed(argv, logs, slow_rank_1)


def slow_rank_1(rank):
    if rank == 1:
        time.sleep(0.4)


def hang_of_rank_1(rank, passes=[0]):  # noqa: B006
    passes[0] += 1
    if rank == 1 and passes[0] == 5:
        time.sleep(600)


def test_a_slow_rank_is_named_with_its_part_and_a_slow_link(corpus, tmp_path):
    sizes = {"training__local_batch_size": 2, "training__global_batch_size": 6, "training__steps": 4}
    argv = options(corpus, tmp_path, **sizes, comm__straggler_freq=2)
    logs = [tmp_path / f"rank{rank}.log" for rank in range(3)]
    assert run_ranks(rank_that_sends_late, 3, argv, logs) == [0, 0, 0]
    named = re.findall(r"step (\d): (.* slow\b.*?):", re.sub(r" \(.*?\)", "", logs[0].read_text()))
    link, part = "the link from rank 2 to rank 0 is slow", "rank 1 is slow in computation"
    assert named == [("2", part), ("2", link), ("4", part), ("4", link)]


def test_looking_for_slow_ranks_changes_no_bit(corpus, tmp_path):
    for name, freq in (("off", 0), ("on", 1)):
        argv = options(corpus, tmp_path / name, comm__straggler_freq=freq)
        code, output = train(argv, world_size=2, log_folder=tmp_path)
        assert code == 0
        assert "the link" not in output
    assert losses(tmp_path / "on") == losses(tmp_path / "off")


def test_ranks_that_are_alike_are_not_called_slow():
    def parts(computation, data=0.01):
        return StepBreakdown(
            host="h", data=data, total=1.2 + data, communication=1.2 - computation, source=0, link=0.001
        )

    assert describe_stragglers([parts(1.0), parts(1.1), parts(0.9)]) == []
    assert describe_stragglers([parts(0.1), parts(0.1), parts(0.1, data=0.05)]) == []
    (line,) = describe_stragglers([parts(0.5), parts(0.5), parts(1.0)])
    assert line == "rank 2 (h) is slow in computation: 1.000 s, median 0.500 s, step 1.210 s"
    (line,) = describe_stragglers([parts(0.5), parts(0.5, data=0.9), parts(0.5)])
    assert line.startswith("rank 1 (h) is slow in data")
    compiled = [replace(parts(0.5, data=data), communication=None) for data in (0.01, 0.9, 0.01)]
    assert describe_stragglers(compiled) == [line]


def slow_links(links, *, hosts="aaaaaaaa"):
    """What is said of a ring whose ranks receive in so many milliseconds."""
    own = {"data": 0.0, "total": 1.0, "communication": None}
    ranks = [
        StepBreakdown(host=host, source=rank - 1 if rank else len(links) - 1, link=link / 1000, **own)
        for rank, (link, host) in enumerate(zip(links, hosts[: len(links)], strict=True))
    ]
    return describe_slow_links(ranks, noise_seconds=0.01)


def test_a_link_is_slow_beside_others_of_its_kind():
    assert slow_links([2, 3, 9, 2]) == slow_links([2, 3, 11, 2]) == slow_links([20, 31, 59, 20]) == []
    assert slow_links([90, 91]) == []  # which is slow cannot be told, or whether
    assert slow_links([2, 2, 40, 2]) == ["the link from rank 1 (a) to rank 2 (a) is slow: 0.0400 s, usual 0.0020 s"]
    assert slow_links([40, 2]) == ["the link from rank 1 (a) to rank 0 (a) is slow: 0.0400 s, usual 0.0020 s"]
    between = [20, 2, 20, 2, 70, 2, 20, 2]
    assert slow_links([20, 2, 20, 2, 20, 2], hosts="aabbcc") == []
    assert slow_links(between, hosts="aabbccdd") == [
        "the link from rank 3 (b) to rank 4 (c) is slow: 0.0700 s, usual 0.0200 s"
    ]


def test_a_rank_whose_links_are_both_slow_is_named_once():
    for count in (3, 4, 8):
        (line,) = slow_links([2, 40, 50, *[2] * (count - 3)])
        assert line == "rank 1 (a) is slow in communication, to receive and to send: 0.0400 s, usual 0.0020 s"


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
        assert json.loads((reports / f"rank{rank}_collectives.json").read_text())["gloo"]["entries"]
        assert "nothing has moved for 4 s" in logs[rank].read_text()


def test_the_ledger_accounts_for_all_time_over_restarts(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=60, checkpoint__interval=10, checkpoint__last_save_in_hf=True)
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
    blocked = {"checkpoint saved": "blocked_seconds", "weights exported": "seconds"}
    saving = [row[blocked[row["event"]]] for row in rows(tmp_path) if row.get("event") in blocked]
    assert ledger["saving_seconds"] == pytest.approx(sum(saving), rel=0.01)
    total = ledger["progress_seconds"] + sum(ledger[f"{kind}_seconds"] for kind in KINDS)
    assert end - start - 3 < total < end - start
    assert ledger["goodput_percent"] == pytest.approx(100 * ledger["progress_seconds"] / total)
    assert f"goodput {ledger['goodput_percent']:.1f} %" in output
    assert "over 2 starts" in output
