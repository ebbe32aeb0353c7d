"""FSDP gathers the parameters of as many blocks ahead, and at once, as the options ask for; some stay in fp32."""

from itertools import groupby

import pytest
import torch
from torch import nn

from tests.support.harness import run_ranks
from tests.support.parity_matrix import QWEN3_5
from tests.support.runs import options
from tests.support.trainers import full_copies, open_trainer, open_trainers
from torchtitan_clone.comm.collectives import is_exchange
from torchtitan_clone.interfaces import FSDPGroup, modules_that_keep_dtype
from torchtitan_clone.parallel.fsdp import _merged
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
        "parallelism__fsdp_blocks_per_group": 1, "training__local_batch_size": 4,
    }  # fmt: skip
    first, *others = run_ranks(gathers_before_each_block, 2, options(corpus, tmp_path, **changes))[0]
    embedding_and_own = 2
    assert first == embedding_and_own + ahead
    # One more with each block, until none is left.
    assert others == [min(first + index, embedding_and_own + 4) for index in range(1, 5)]


@pytest.mark.parametrize(
    ("blocks", "started"),
    [
        (2, [3, 4, 4, 4, 4]),  # groups of one, two and two blocks; the embedding's comes first
        (-1, [2, 2, 2, 2, 2]),  # a CPU gathers small blocks together
    ],
)
def test_blocks_of_a_group_are_gathered_at_once(corpus, tmp_path, blocks, started):
    changes = {"model__args__n_layers": 5, "parallelism__fsdp_blocks_per_group": blocks}
    assert run_ranks(gathers_before_each_block, 2, options(corpus, tmp_path, **changes))[0] == started


def fsdp_groups_of(argv):
    """Returns the names of the modules of each group of blocks that FSDP shards together."""
    with open_trainer(argv) as trainer:
        layers = trainer.engine.model_parts[0].layers
        states = groupby(layers.items(), key=lambda item: id(item[1]._get_fsdp_state()))
        return ["".join(name for name, _ in items) for _, items in states]


@pytest.mark.parametrize(
    ("frozen", "blocks", "names"),
    [
        (0, 1, ["0", "1", "2", "3", "4"]),
        (0, 2, ["0", "12", "34"]),
        (0, 4, ["01", "234"]),
        (0, 5, ["01234"]),
        (1, 9, ["0", "1234"]),
        (3, 2, ["0", "12", "34"]),
    ],
)
def test_groups_are_of_one_size_and_all_frozen_or_none(corpus, tmp_path, frozen, blocks, names):
    changes = {"model__args__n_layers": 5, "parallelism__fsdp_blocks_per_group": blocks}
    if frozen:
        changes["training__freeze_schedule"] = f"[{{step = 1, layers = {frozen}}}]"
    assert run_ranks(fsdp_groups_of, 2, options(corpus, tmp_path, **changes)) == [names, names]


def test_layers_of_multi_token_prediction_have_groups_of_their_own():
    modules = [nn.Linear(1, 1) for _ in range(5)]
    groups = [FSDPGroup(modules=(module,), is_block=index < 3) for index, module in enumerate(modules)]
    merged = _merged(groups, max_blocks=9)
    assert [[modules.index(module) for module in group.modules] for group in merged] == [[0, 1, 2], [3], [4]]
    assert [group.is_block for group in merged] == [True, False, False]


def decays_of_a_step(runs):
    """Returns of each run the parameters of decays that a forward computes with, and those of the optimizer."""
    found = []
    for trainer in open_trainers(runs):
        used, parameters = [], trainer.engine.parameters
        for module in modules_that_keep_dtype(trainer.engine.model_parts[0]):
            module.register_forward_pre_hook(
                lambda module, _, used=used: used.extend(x.detach().clone() for x in module.parameters())
            )
        wanted = full_copies((name, x) for name, x in parameters.items() if ".decay." in name)
        trainer.train_step(1)
        found.append((used[: len(wanted)], [*wanted.values()]))
    return found


def test_decays_stay_in_fp32_in_mixed_precision(corpus, tmp_path):
    """On one rank without and with FSDP, and on two."""
    changes = {**QWEN3_5, "training__mixed_precision_param": "bfloat16", "training__local_batch_size": 2}
    always = {"parallelism__fsdp_reshard_after_forward": "always"}
    runs = [options(corpus, tmp_path / str(len(each)), **changes, **each) for each in ({}, always)]
    (one,), (first, second) = (run_ranks(decays_of_a_step, ranks, runs) for ranks in (1, 2))
    for used, wanted in (*one, *first, *second):
        assert len(used) == len(wanted) == 2
        for x, y, of_one in zip(used, wanted, one[0][0], strict=True):
            assert x.dtype == torch.float32
            assert torch.equal(x, y)
            assert torch.equal(x, of_one)
            assert not torch.equal(x, x.bfloat16().float())
