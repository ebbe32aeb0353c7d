"""Collectives by messages equal their definitions, through shared memory, by gloo, and by both at once."""

import tempfile

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from torchtitan_clone.comm.collectives import (
    StartedSum,
    all_gather,
    all_to_all,
    exchange_slices,
    reduce_scatter,
)
from torchtitan_clone.config import load_config
from torchtitan_clone.cpu.shared_memory import connect, streams_of
from torchtitan_clone.ops.token_shards import _compiled_exchange
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group


def collectives(folders):
    """Checks all collectives by exact sums of integers; returns how many ranks this one is connected with."""
    launch = Launch.from_environment()
    tempfile.tempdir = folders[launch.rank]
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group, ranks, rank = dist.GroupMember.WORLD, launch.world_size, launch.rank
        if folders[0]:
            connect(group)
        for dtype, size in ((torch.float32, 6), (torch.bfloat16, 6), (torch.int64, 1 << 20)):
            # [rank, target, 2, size]: what each rank sends to each other one; no slice of the last dimensions is alone.
            whole = torch.arange(ranks * ranks * 2 * size).remainder(251).to(dtype).view(ranks, ranks, 2, size)
            parts = whole[rank].transpose(1, 2)
            assert not parts[0].is_contiguous()
            for found, expected in [
                (all_gather(parts[0], group=group), [whole[source, 0].T for source in range(ranks)]),
                (all_to_all(parts, group=group), [whole[source, rank].T for source in range(ranks)]),
                (exchange_slices(parts, group.group_name), [whole[source, rank].T for source in range(ranks)]),
                ([reduce_scatter(parts, group=group)], [whole[:, rank].sum(0, dtype=dtype).T]),
            ]:
                assert all(map(torch.equal, found, expected))
            check_sums(whole, group=group)
        return len(streams_of(group.group_name))


def check_sums(whole, *, group):
    """Checks sums in place that are started together: of a size that ranks do not divide, of one number, and of all."""
    totals = [whole.remainder(8).flatten(1)[:, :size] for size in (7, 1, None)]  # exact in bfloat16 too
    own = [x[group.rank()].clone() for x in totals]
    sums = [StartedSum(x, group=group) for x in own]
    sums[0].start_gather()
    for each in reversed(sums[1:]):
        each.start_gather()
    for each in sums:
        each.wait()
    assert all(torch.equal(x, total.sum(0, dtype=total.dtype)) for x, total in zip(own, totals, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_equal_their_definitions(tmp_path, ranks):
    assert run_ranks(collectives, ranks, [str(tmp_path)] * ranks) == [ranks - 1] * ranks
    assert run_ranks(collectives, ranks, [""] * ranks) == [0] * ranks


def test_some_ranks_use_shared_memory_and_others_gloo(tmp_path):
    (alone := tmp_path / ("x" * 100)).mkdir()  # its sockets would have too long a path
    assert run_ranks(collectives, 3, [str(tmp_path), str(alone), str(tmp_path)]) == [1, 0, 1]


def check_operators():
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        name = dist.GroupMember.WORLD.group_name
        checks = ("test_schema", "test_faketensor")
        slices = torch.randn(3, 2, 4, 5).transpose(0, 1)
        torch.library.opcheck(exchange_slices, (slices, name), test_utils=checks)
        tokens = torch.randn(4, 3, 6).transpose(0, 1)
        for gathers in (True, False):
            torch.library.opcheck(_compiled_exchange, (tokens, gathers, 2, name), test_utils=checks)


def test_operators_of_compiled_regions_return_what_they_promise():
    run_ranks(check_operators, 2)
