"""Tests of random states in format.py: every rank resumes with its own random state."""

import pytest
import torch

from tests.support.checkpoint_states import build_manager, make_state, progress_at, rank_of_a_group
from tests.support.harness import run_ranks


def save_and_draw(folder, mode):
    """Returns what this rank draws after a save."""
    with rank_of_a_group():
        torch.manual_seed(torch.distributed.get_rank())
        torch.rand(7)
        manager = build_manager(folder, make_state(step=1), async_mode=mode)
        manager.save(progress_at(1))
        drawn = torch.rand(5)
        manager.finish()
        return drawn


def resume_and_draw(folder):
    """Returns what this rank draws after resuming."""
    with rank_of_a_group():
        torch.manual_seed(100 + torch.distributed.get_rank())
        manager = build_manager(folder, make_state(step=0))
        manager.find_resume_point()
        manager.load()
        return torch.rand(5)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_every_rank_resumes_with_its_own_random_state(tmp_path, mode):
    drawn = run_ranks(save_and_draw, 2, tmp_path, mode)
    assert not torch.equal(*drawn)
    again = run_ranks(resume_and_draw, 3, tmp_path)
    assert torch.equal(torch.stack(again[:2]), torch.stack(drawn))
    assert torch.equal(again[2], torch.rand(5, generator=torch.Generator().manual_seed(102)))  # it did not exist
