"""Shards of DTensors: the region of the global tensor that each rank holds, and what two shards have in common."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.checkpoint_states import rank_of_a_group
from tests.support.harness import run_ranks
from torchtitan_clone.ops.dtensor_shards import TensorShard, gather_shard_map, local_shard, local_shard_and_offset

TENSOR = torch.arange(35).reshape(7, 5)  # two ranks divide neither dimension
PLACEMENTS = {
    "both dimensions": (Shard(0), Shard(1)),
    "one dimension twice": (Shard(0), Shard(0)),
    "rows and replicas": (Shard(0), Replicate()),
    "replicas": (Replicate(), Replicate()),
}


def check_shards():
    """Asserts that shard and offset select the same numbers of the global tensor; returns the shards of all ranks."""
    with rank_of_a_group():
        mesh = init_device_mesh("cpu", (2, 2))
        tensors = {name: distribute_tensor(TENSOR, mesh, placements) for name, placements in PLACEMENTS.items()}
        tensors["plain"] = TENSOR + torch.distributed.get_rank()
        for name, tensor in tensors.items():
            shard, offset = local_shard_and_offset(tensor)
            assert shard.data_ptr() == local_shard(tensor).data_ptr()
            window = tuple(slice(start, start + size) for start, size in zip(offset, shard.shape, strict=True))
            expected = tensor if name == "plain" else TENSOR
            assert torch.equal(shard, expected[window]), name
        only_first = {"of rank 0": TENSOR} if torch.distributed.get_rank() == 0 else {}
        return gather_shard_map(tensors | only_first)


def test_every_rank_knows_the_shards_of_all():
    first, *others = run_ranks(check_shards, 4)
    assert all(other == first for other in others)
    assert set(first.pop("of rank 0")) == {0}
    assert all(set(shards) == {0, 1, 2, 3} for shards in first.values())
    sizes = {name: sum(torch.Size(shard.size).numel() for shard in shards.values()) for name, shards in first.items()}
    assert sizes == {
        "both dimensions": 35, "one dimension twice": 35, "rows and replicas": 70, "replicas": 140, "plain": 140,
    }  # fmt: skip
    assert all(shard.global_shape == TENSOR.shape for shards in first.values() for shard in shards.values())


def shard(offset, size):
    return TensorShard(
        offset=offset, size=size, global_shape=TENSOR.shape, dtype=TENSOR.dtype, device_type=TENSOR.device.type
    )


@pytest.mark.parametrize(
    ("first", "second", "region"),
    [
        (((0, 0), (4, 5)), ((2, 3), (5, 2)), [(2, 4), (3, 5)]),
        (((0, 0), (4, 5)), ((4, 0), (3, 5)), None),
        (((0, 0), (0, 5)), ((0, 0), (7, 5)), None),
    ],
    ids=["corner", "adjacent", "empty"],
)
def test_overlap_and_window_select_the_same_numbers(first, second, region):
    shards = [shard(*first), shard(*second)]
    assert shards[0].overlap(shards[1]) == shards[1].overlap(shards[0]) == region
    if region is not None:
        expected = TENSOR[tuple(slice(a, b) for a, b in region)]
        for each in shards:
            held = TENSOR[tuple(slice(a, a + n) for a, n in zip(each.offset, each.size, strict=True))]
            assert torch.equal(held[each.window(region)], expected)
