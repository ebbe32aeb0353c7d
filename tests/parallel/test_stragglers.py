"""Slow ranks and slow links are named; equal ones are not."""

import json
import re
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from tests.support.runs import losses, options, read_json_lines, train
from torchtitan_clone.config import resolved_degrees
from torchtitan_clone.config.schema import Comm, Parallelism
from torchtitan_clone.observe.records import BREAKDOWNS_FILE, TIMELINE_FILE
from torchtitan_clone.parallel.mesh import build_mesh
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.parallel.stragglers import (
    StepBreakdown,
    StragglerMonitor,
    describe_slow_links,
    describe_stragglers,
    works_of,
)

CPU = torch.device("cpu")


def lines_of_steps(*, can_time_collectives):
    """Reports of four steps in which rank 1 computes for longer and rank 2 sends late."""
    launch = Launch.from_environment()
    transfer = dist.batch_isend_irecv

    def late(operations):
        time.sleep(0.06 * (launch.rank == 2 and operations[0].op is dist.isend))
        return transfer(operations)

    dist.batch_isend_irecv = late  # torch's own: the delay of a link
    reports = {}
    with process_group(Comm(), launch=launch, device=CPU):
        mesh = build_mesh(resolved_degrees(Parallelism(), 3), loss_rank=0, device_type="cpu")
        monitor = StragglerMonitor(
            Comm(straggler_freq=2), launch=launch, device=CPU, can_time_collectives=can_time_collectives
        )
        for step in range(1, 5):
            start = time.perf_counter()
            timer = monitor.timer(step, mesh=mesh)
            assert (timer is not None) == (can_time_collectives and step % 2 == 0)
            if timer is not None:
                with timer:
                    time.sleep(0.4 * (launch.rank == 1))
                    dist.all_reduce(torch.ones(8))
            seconds = time.perf_counter() - start
            reports[step] = monitor.report(step, timer=timer, data_seconds=0.0, total_seconds=seconds)
    return reports


def lines_with_timer():
    return lines_of_steps(can_time_collectives=True)


def lines_without_timer():
    return lines_of_steps(can_time_collectives=False)


SLOW_LINK = "the link from rank 2 to rank 0 is slow"


@pytest.mark.parametrize(
    ("run", "expected"),
    [(lines_with_timer, ["rank 1 is slow in computation", SLOW_LINK]), (lines_without_timer, [SLOW_LINK])],
)
def test_slow_rank_and_slow_link_are_named(run, expected):
    for reports in run_ranks(run, 3):
        for step, report in reports.items():
            named = [re.sub(r" \(.*?\)|:.*", "", line) for line in report.lines]
            assert named == (expected if step % 2 == 0 else []), step


def test_monitoring_is_bit_equal(corpus, tmp_path):
    for name, freq in (("off", 0), ("on", 1)):
        argv = options(corpus, tmp_path / name, comm__straggler_freq=freq)
        code, output = train(argv, world_size=2, log_folder=tmp_path)
        assert code == 0
        assert "the link" not in output
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    folder = tmp_path / "on" / "run"
    breakdowns = read_json_lines(folder / BREAKDOWNS_FILE)
    assert [breakdown["step"] for breakdown in breakdowns] == list(losses(tmp_path / "on"))
    timeline = json.loads((folder / TIMELINE_FILE).read_text())
    assert timeline["step"] == breakdowns[-1]["step"]
    for rank in range(2):
        spans = timeline["spans"][rank]
        assert {name for name, _, _ in spans} >= {"world/fsdp all_gather", "world/fsdp reduce_scatter"}
        assert sum(seconds for _, _, seconds in spans) == pytest.approx(timeline["communication"][rank], abs=1e-4)
        assert all(0 <= start < start + seconds <= timeline["total"][rank] for _, start, seconds in spans)
    assert not (tmp_path / "off" / "run" / BREAKDOWNS_FILE).exists()


def test_equal_ranks_are_not_named():
    def breakdown(computation, data=0.01):
        return StepBreakdown(
            host="h", data=data, total=1.2 + data, communication=1.2 - computation, source=0, link=0.001
        )

    assert describe_stragglers([breakdown(1.0), breakdown(1.1), breakdown(0.9)]) == []
    assert describe_stragglers([breakdown(0.1), breakdown(0.1), breakdown(0.1, data=0.05)]) == []
    (line,) = describe_stragglers([breakdown(0.5), breakdown(0.5), breakdown(1.0)])
    assert line == "rank 2 (h) is slow in computation: 1.000 s, median 0.500 s, step 1.210 s"
    (line,) = describe_stragglers([breakdown(0.5), breakdown(0.5, data=0.9), breakdown(0.5)])
    assert line.startswith("rank 1 (h) is slow in data")
    compiled = [replace(breakdown(0.5, data=data), communication=None) for data in (0.01, 0.9, 0.01)]
    assert describe_stragglers(compiled) == [line]


def slow_links(links, *, hosts="aaaaaaaa"):
    """Lines about a ring whose ranks receive in so many milliseconds."""
    own = {"data": 0.0, "total": 1.0, "communication": None}
    ranks = [
        StepBreakdown(host=host, source=rank - 1 if rank else len(links) - 1, link=link / 1000, **own)
        for rank, (link, host) in enumerate(zip(links, hosts[: len(links)], strict=True))
    ]
    return describe_slow_links(ranks, noise_seconds=0.01)


def test_link_is_compared_with_others_of_its_kind():
    assert slow_links([2, 3, 9, 2]) == slow_links([2, 3, 11, 2]) == slow_links([20, 31, 59, 20]) == []
    assert slow_links([90, 91]) == []  # which one is slow, or whether, cannot be told
    assert slow_links([2, 2, 40, 2]) == ["the link from rank 1 (a) to rank 2 (a) is slow: 0.0400 s, usual 0.0020 s"]
    assert slow_links([40, 2]) == ["the link from rank 1 (a) to rank 0 (a) is slow: 0.0400 s, usual 0.0020 s"]
    between = [20, 2, 20, 2, 70, 2, 20, 2]
    assert slow_links([20, 2, 20, 2, 20, 2], hosts="aabbcc") == []
    assert slow_links(between, hosts="aabbccdd") == [
        "the link from rank 3 (b) to rank 4 (c) is slow: 0.0700 s, usual 0.0200 s"
    ]


@pytest.mark.parametrize("count", [3, 4, 8])
def test_rank_with_two_slow_links_is_named_once(count):
    (line,) = slow_links([2, 40, 50, *[2] * (count - 3)])
    assert line == "rank 1 (a) is slow in communication, to receive and to send: 0.0400 s, usual 0.0020 s"


def test_collectives_that_torch_waits_for_itself_have_no_work():
    """Those of NCCL with async_op=False."""
    assert works_of([torch.ones(2), dist.Work.boxed(None)]) == []
