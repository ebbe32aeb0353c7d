"""Tests of SaveVotes in save.py: ranks report to rank 0, which announces the outcome."""

from tests.support.checkpoint_states import rank_of_a_group
from tests.support.harness import run_ranks
from torchtitan_clone.checkpoint.save import SaveVotes
from torchtitan_clone.checkpoint.writer import FileRecord


def report_and_collect(reporting):
    """Returns what rank 0 collects from the ranks that report, or its error, and the outcome on each rank."""
    import torch.distributed as dist

    with rank_of_a_group():
        rank = dist.get_rank()
        votes = SaveVotes("some-save")
        if rank in reporting:
            votes.report({f"rank-{rank}": FileRecord(bytes=rank, digest="")}, error=None)
        collected = None
        if rank == 0:
            try:
                collected = votes.collect(timeout_seconds=0.5)
                votes.announce(None)
            except TimeoutError as error:
                collected = str(error)
                votes.announce(collected)
        outcome = votes.outcome(timeout_seconds=60)
        dist.barrier()
        if rank == 0:
            votes.forget()
        dist.barrier()
        return collected, outcome, votes.outcome(timeout_seconds=0.01)


def test_reports_of_all_ranks_are_collected_and_the_outcome_forgotten():
    answers = run_ranks(report_and_collect, 2, (0, 1))
    assert answers[0][0] == {f"rank-{rank}": FileRecord(bytes=rank, digest="") for rank in (0, 1)}
    for _, outcome, after in answers:
        assert outcome is None
        assert "rank 0 did not commit within 0.01 s" in after


def test_a_rank_that_does_not_report_is_named_to_all():
    for _, outcome, _ in run_ranks(report_and_collect, 3, (0, 2)):
        assert "ranks [1] did not finish writing within 0.5 s" in outcome
        assert "checkpoint.writer_timeout_seconds" in outcome
