"""Tensors in joint memory keep their values until this rank frees them, whatever other ranks allocate."""

import random
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchtitan_clone.config import load_config
from torchtitan_clone.ops.joint_memory import JOINT_BYTES, JointMemory
from torchtitan_clone.ops.messages import others, start_exchange
from torchtitan_clone.ops.shared_memory import connect, joint_memory_of
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.testing.harness import run_ranks


def memory_of_one_rank(size):
    return JointMemory(np.zeros(size, dtype=np.uint8), peers={}, wait=lambda pairs: None)


def places(memory, sizes):
    """Returns the tensors and their places."""
    tensors = [memory.allocate([size], dtype=torch.uint8) for size in sizes]
    return tensors, [None if x is None else memory.place_of(x) for x in tensors]


def test_tensors_are_aligned_and_have_what_they_are_asked_for():
    memory = memory_of_one_rank(1 << 12)
    tensors, found = places(memory, [100, 1, 64])
    assert found == [0, 128, 192]
    x = memory.allocate([3, 5], dtype=torch.bfloat16)
    assert (x.shape, x.dtype, memory.place_of(x), memory.place_of(x[1])) == ((3, 5), torch.bfloat16, 256, 266)
    assert memory.place_of(torch.zeros(3)) is None
    assert memory.allocate([0], dtype=torch.uint8) is None
    del tensors


def test_what_is_free_is_allocated_again_and_what_a_view_keeps_is_not():
    memory = memory_of_one_rank(4 * 64)
    tensors, found = places(memory, [64, 64, 64])
    assert found == [0, 64, 128]
    view = tensors[0][:1]
    del tensors[:2]
    kept, found = places(memory, [100, 64, 64])
    assert found == [None, 64, 192]  # two free places, which are not beside each other
    del view, tensors[0]
    assert places(memory, [65])[1] == [None]
    assert places(memory, [64])[1] == [0]
    assert kept[1] is not None


def run_in_joint_memory(seed, steps, limit):
    """Checks random tensors, which a rank writes a part of, before they are freed; returns how many had no room."""
    launch = Launch.from_environment()
    chance = random.Random(seed)  # the same on all ranks
    delays = random.Random(launch.rank)
    missing = 0
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group, ranks, rank = dist.GroupMember.WORLD, launch.world_size, launch.rank
        connect(group)
        memory = joint_memory_of(group.group_name)
        live = []
        for number in range(steps):
            tensor = memory.allocate([ranks, chance.randrange(1, limit)], dtype=torch.int32)
            if tensor is None:
                missing += 1
            else:
                tensor[rank].fill_(1000 * number + rank)
                received = others(tensor, group=group)
                sent = [(other, tensor[rank]) for other, _ in received]
                live.append((number, tensor, start_exchange(sent, received, group=group, collective="all_gather")))
            del tensor
            if delays.random() < 0.1:
                time.sleep(0.01 * delays.random())
            while len(live) > 3 or (live and chance.random() < 0.3):
                number, tensor, messages = live.pop(chance.randrange(len(live)))
                messages.wait()
                for other in range(ranks):
                    assert (tensor[other] == 1000 * number + other).all(), (number, other)
                del tensor
        dist.barrier()
    return missing


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_keep_their_values_until_they_are_freed(ranks):
    assert run_ranks(run_in_joint_memory, ranks, 1, 400, 1 << 12) == [0] * ranks
    of_rank = JOINT_BYTES // 4 // ranks
    found = run_ranks(run_in_joint_memory, ranks, 2, 60, of_rank // 3)
    assert found == [found[0]] * ranks
    assert 0 < found[0] < 50


def allocate_again_without_the_other_rank(seconds):
    """Returns the error of rank 0, which waits for what rank 1 does not free."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
        connect(group)
        memory = joint_memory_of(group.group_name)
        large = [JOINT_BYTES // 2 + 1]
        tensor = memory.allocate(large, dtype=torch.uint8)
        if launch.rank == 1:
            time.sleep(2 * seconds)
            return tensor is not None
        del tensor
        with pytest.raises(RuntimeError) as error:
            memory.allocate(large, dtype=torch.uint8)
        return str(error.value)


def test_a_rank_that_frees_nothing_is_an_error_after_the_time():
    message, has_tensor = run_ranks(allocate_again_without_the_other_rank, 2, 3)
    assert has_tensor
    assert message == "timed out after 3 s: waited in a collective for rank 1 of the group"
