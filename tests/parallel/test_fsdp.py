"""FSDP gathers the parameters of as many blocks ahead as the options ask for."""

import pytest

from torchtitan_clone.ops.messages import is_exchange
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options
from torchtitan_clone.testing.trainers import open_trainer
from torchtitan_clone.torch_compat import TorchDispatchMode


class GatherCounter(TorchDispatchMode):
    """Counts all-gathers as they start."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_exchange(func):
            self.count += args[-1] == "all_gather"
        return func(*args, **(kwargs or {}))


def gathers_before_each_block(argv):
    """Returns how many all-gathers had started when the attention of each block began."""
    gathers, before = GatherCounter(), []
    with open_trainer(argv) as trainer:
        for block in trainer.engine.model_parts[0].layers.values():
            block.attention.register_forward_pre_hook(lambda *_: before.append(gathers.count))
        with gathers:
            trainer.train_step(1)
    return before


@pytest.mark.parametrize("ahead", [1, 3])
def test_parameters_are_gathered_as_many_blocks_ahead_as_asked(corpus, tmp_path, ahead):
    changes = {
        "model__args__n_layers": 5, "parallelism__fsdp_prefetch_blocks": ahead,
        "training__local_batch_size": 4,
    }  # fmt: skip
    first, *others = run_ranks(gathers_before_each_block, 2, options(corpus, tmp_path, **changes))[0]
    embedding_and_own = 2
    assert first == embedding_and_own + ahead
    # One more with each block, until none is left.
    assert others == [min(first + index, embedding_and_own + 4) for index in range(1, 5)]
