"""Gathers and sums by messages run during backward, and add to gradients that exist; their values: comm/."""

import tempfile

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from tests.support.runs import options
from tests.support.trainers import open_trainer
from torchtitan_clone.comm.collectives import is_exchange
from torchtitan_clone.config import load_config
from torchtitan_clone.cpu.shared_memory import connect
from torchtitan_clone.parallel.fsdp import GatherByMessages
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.run import preflight
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.torch_compat import TorchDispatchMode


def start_gather_before_the_other_rank(connects):
    """Starts to gather on rank 0; rank 1 starts when rank 0 has told it to, which a gather that waits prevents."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        whole, told = torch.zeros(2 << 20), torch.zeros(1)
        if connects:
            connect(dist.GroupMember.WORLD)
        if launch.rank == 1:
            dist.recv(told, src=0)
        part = whole.chunk(2)[launch.rank].fill_(1.0)
        group = dist.GroupMember.WORLD
        gathered = GatherByMessages()(output_tensor=whole, input_tensor=part, group=group)
        if launch.rank == 0:
            dist.send(told, dst=1)
        gathered.wait()
        return bool(whole.all())


@pytest.mark.parametrize("connects", [True, False], ids=["shared memory", "gloo"])
def test_a_gather_does_not_wait_for_other_ranks(connects):
    assert run_ranks(start_gather_before_the_other_rank, 2, connects, timeout=30) == [True, True]


class Sums(TorchDispatchMode):
    """Notes when sums start, and when they are computed."""

    def __init__(self):
        super().__init__()
        self.events = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_exchange(func):
            self.events += "(" * (args[-1] == "reduce_scatter")
        elif func is torch.ops.aten.add.out:
            self.events += ")"
        return func(*args, **(kwargs or {}))


def two_backwards(argv, temporary):
    """Returns the events of two backwards of one batch, and whether the second doubled all gradients."""
    tempfile.tempdir = temporary or tempfile.tempdir  # of the sockets by which ranks connect
    with open_trainer(argv) as trainer:
        engine = trainer.engine
        parameters = engine.parameters.values()
        launch = Launch.from_environment()
        dataset = preflight.prepare(engine.plan, launch=launch).dataset
        loader, _ = open_loaders(engine.plan, dataset=dataset, rank=launch.rank)
        batch = next(loader)
        events, gradients = [], []
        for _ in range(2):
            with Sums() as sums:
                engine.forward_backward([batch], num_targets=1)
            events.append(sums.events)
            gradients.append([parameter.grad.to_local().clone() for parameter in parameters])
        once, twice = gradients
        return events, all((2 * first).equal(second) for first, second in zip(once, twice, strict=True))


@pytest.mark.parametrize(
    ("changes", "connects", "expected"),
    [
        # Embedding, blocks and output: two sums are in flight.
        ({}, True, "((()()()))"),
        ({}, False, "((()()()))"),
        ({"training__mixed_precision_reduce": "bfloat16"}, True, None),
        ({"parallelism__pipeline_parallel_degree": 2}, True, None),
    ],
    ids=["fp32", "fp32, gloo", "reduced in bf16", "pipeline"],
)
def test_gradients_are_summed_during_backward_unless_fsdp_reads_them(corpus, tmp_path, changes, connects, expected):
    ranks = 2 * changes.get("parallelism__pipeline_parallel_degree", 1)
    changes = {"training__local_batch_size": 2, "model__args__n_layers": 3, "model__args__dim": 256} | changes
    changes["parallelism__fsdp_blocks_per_group"] = 1
    argv = options(corpus, tmp_path, **changes)
    long = tmp_path / ("x" * 100)  # no socket has such a path
    long.mkdir()
    for (once, again), doubled in run_ranks(two_backwards, ranks, argv, None if connects else str(long)):
        one_by_one = "()" * (len(once) // 2)
        assert once == (expected or one_by_one)
        assert again == one_by_one
        assert doubled
