"""Hangs: all ranks report their stacks and collectives, and the collective's timeout ends the run."""

import json
import os
import time

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.marks import needs_door
from tests.support.harness import RankFailed, run_ranks
from tests.support.runs import options, train, train_rank

TIMEOUT_SECONDS = 4


def train_rank_that_hangs(argv, logs):
    """Trains on a rank; rank 1 hangs in the fifth forward of its model."""
    forwards = 0

    def hang_in_forward(module, _args):
        nonlocal forwards
        forwards += hasattr(module, "layers")
        if forwards == 5 and os.environ["RANK"] == "1":
            time.sleep(600)

    register_module_forward_pre_hook(hang_in_forward)
    return train_rank(argv, logs)


@needs_door("cpu")
@pytest.mark.parametrize("resumed", [False, True])
def test_a_hang_is_reported_by_all_ranks_and_ends_the_run(corpus, tmp_path, resumed):
    if resumed:
        assert train(options(corpus, tmp_path, training__steps=2), world_size=2, log_folder=tmp_path)[0] == 0
    changes = {"comm__train_timeout_seconds": TIMEOUT_SECONDS, "comm__init_timeout_seconds": 60}
    argv = options(corpus, tmp_path, training__steps=50, **changes)
    logs = [tmp_path / f"hung.rank{rank}.log" for rank in range(2)]
    with pytest.raises(RankFailed, match=f"timed out after {TIMEOUT_SECONDS} s: waited in a collective for rank 1"):
        run_ranks(train_rank_that_hangs, 2, argv, logs)
    reports = tmp_path / "run" / "comm_traces"
    assert "hang_in_forward" in (reports / "rank1_stacks.txt").read_text()
    assert "train_step" in (reports / "rank0_stacks.txt").read_text()
    for rank in (0, 1):
        assert json.loads((reports / f"rank{rank}_collectives.json").read_text())["gloo"]["entries"]
        assert "no progress for 4 s" in logs[rank].read_text()
