"""FSDP gathers the parameters of as many blocks ahead as the options ask for."""

from functools import partial

import pytest
import torch

from torchtitan_clone.parallel.fsdp import SumOfOneRank
from torchtitan_clone.parallel.messages import collective_of_message
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options
from torchtitan_clone.testing.trainers import open_trainer
from torchtitan_clone.torch_compat import TorchDispatchMode


class GatherCounter(TorchDispatchMode):
    """Counts all-gathers of two ranks as they start, by their messages."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.send.default:
            self.count += collective_of_message("send", args) == "all_gather"
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


class GradientPasses(TorchDispatchMode):
    """Counts divisions and copies of the gradients of a block, which FSDP keeps in one tensor."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.copy_.default) and args[0].shape == (self.size,):
            self.count += args[0] is not args[1]
        return func(*args, **(kwargs or {}))


def passes_over_gradients(argv):
    with open_trainer(argv) as trainer:
        block = trainer.engine.model_parts[0].layers["0"]
        with GradientPasses(sum(parameter.numel() for parameter in block.parameters())) as passes:
            trainer.train_step(1)
        return passes.count


def test_sums_of_gradients_are_not_divided_or_copied_on_one_shard(corpus, tmp_path):
    argv = options(corpus, tmp_path, model__args__n_layers=3)
    assert run_ranks(passes_over_gradients, 1, [*argv, "--parallelism.fsdp_reshard_after_forward=always"]) == [0]
    mesh = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    assert run_ranks(passes_over_gradients, 2, [*argv, *mesh]) == [0, 0]


def test_the_sum_of_one_rank_has_the_memory_of_its_gradients():
    sums, cpu = SumOfOneRank(), torch.device("cpu")
    allocate = partial(sums.allocate, (4,), dtype=torch.float32, device=cpu)
    pairs = [(allocate(), allocate()) for _ in range(3)]
    assert all(gradients is total for gradients, total in pairs)
    assert len({id(gradients) for gradients, _ in pairs}) == 3
    allocate()  # freed before that of its sum is asked for, as by an error
    gradients, total = allocate(), allocate()
    assert gradients is total
    gradients[:] = torch.arange(4)
    sums(output_tensor=total, input_tensor=gradients)
    assert total.tolist() == [0, 1, 2, 3]
