"""Slow ranks and slow links are found and named in the log."""

import os
import re
import time
from dataclasses import replace

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from torchtitan_clone.parallel.stragglers import StepBreakdown, describe_slow_links, describe_stragglers
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import losses, options, train, train_rank


def train_slow_rank(argv, logs):
    """Trains on a rank; the forward of rank 1 takes longer, and so does what rank 2 sends."""
    rank = int(os.environ["RANK"])
    transfer = dist.batch_isend_irecv

    def delayed_transfer(operations):
        if rank == 2 and operations[0].op is dist.isend:
            time.sleep(0.06)
        return transfer(operations)

    def delay_forward(module, _args):
        if rank == 1 and hasattr(module, "layers"):
            time.sleep(0.4)

    dist.batch_isend_irecv = delayed_transfer
    register_module_forward_pre_hook(delay_forward)
    return train_rank(argv, logs)


def test_a_slow_rank_and_a_slow_link_are_named(corpus, tmp_path):
    sizes = {"training__local_batch_size": 2, "training__global_batch_size": 6, "training__steps": 4}
    argv = options(corpus, tmp_path, **sizes, comm__straggler_freq=2)
    logs = [tmp_path / f"rank{rank}.log" for rank in range(3)]
    assert run_ranks(train_slow_rank, 3, argv, logs) == [0, 0, 0]
    named = re.findall(r"step (\d): (.* slow\b.*?):", re.sub(r" \(.*?\)", "", logs[0].read_text()))
    link = "the link from rank 2 to rank 0 is slow"
    computation = "rank 1 is slow in computation"
    assert named == [("2", computation), ("2", link), ("4", computation), ("4", link)]


def test_straggler_reports_do_not_change_the_losses(corpus, tmp_path):
    for name, freq in (("off", 0), ("on", 1)):
        argv = options(corpus, tmp_path / name, comm__straggler_freq=freq)
        code, output = train(argv, world_size=2, log_folder=tmp_path)
        assert code == 0
        assert "the link" not in output
    assert losses(tmp_path / "on") == losses(tmp_path / "off")


def test_only_ranks_far_from_the_median_are_reported():
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
    """Describes a ring in which each rank receives in so many milliseconds."""
    own = {"data": 0.0, "total": 1.0, "communication": None}
    ranks = [
        StepBreakdown(host=host, source=rank - 1 if rank else len(links) - 1, link=link / 1000, **own)
        for rank, (link, host) in enumerate(zip(links, hosts[: len(links)], strict=True))
    ]
    return describe_slow_links(ranks, noise_seconds=0.01)


def test_links_are_compared_with_links_of_the_same_kind():
    assert slow_links([2, 3, 9, 2]) == slow_links([2, 3, 11, 2]) == slow_links([20, 31, 59, 20]) == []
    assert slow_links([90, 91]) == []  # two links: neither is known to be the slow one
    assert slow_links([2, 2, 40, 2]) == ["the link from rank 1 (a) to rank 2 (a) is slow: 0.0400 s, usual 0.0020 s"]
    assert slow_links([40, 2]) == ["the link from rank 1 (a) to rank 0 (a) is slow: 0.0400 s, usual 0.0020 s"]
    between = [20, 2, 20, 2, 70, 2, 20, 2]
    assert slow_links([20, 2, 20, 2, 20, 2], hosts="aabbcc") == []
    assert slow_links(between, hosts="aabbccdd") == [
        "the link from rank 3 (b) to rank 4 (c) is slow: 0.0700 s, usual 0.0200 s"
    ]


def test_a_rank_with_two_slow_links_is_named_once():
    for count in (3, 4, 8):
        (line,) = slow_links([2, 40, 50, *[2] * (count - 3)])
        assert line == "rank 1 (a) is slow in communication, to receive and to send: 0.0400 s, usual 0.0020 s"
