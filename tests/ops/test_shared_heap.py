"""Tensors in a shared heap keep their values until this rank frees them, whatever other ranks allocate."""

import os
import random
import resource
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torchtitan_clone.config import load_config
from torchtitan_clone.ops.messages import others, start_exchange
from torchtitan_clone.ops.shared_heap import HEAP_BYTES_PER_RANK, Frees, SharedHeap
from torchtitan_clone.ops.shared_memory import Transfer, connect, shared_heap_of, streams_of
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.torch_compat import set_group_timeout


def heap_of_one_rank(size):
    return SharedHeap(np.zeros(size, dtype=np.uint8), peers={}, wait=lambda pairs: None)


def places(memory, sizes):
    """Returns the tensors and their places."""
    tensors = [memory.allocate([size], dtype=torch.uint8) for size in sizes]
    return tensors, [None if x is None else memory.offset_of(x) for x in tensors]


def test_tensors_are_aligned_and_have_what_they_are_asked_for():
    memory = heap_of_one_rank(1 << 12)
    tensors, found = places(memory, [100, 1, 64])
    assert found == [0, 128, 192]
    x = memory.allocate([3, 5], dtype=torch.bfloat16)
    assert (x.shape, x.dtype, memory.offset_of(x), memory.offset_of(x[1])) == ((3, 5), torch.bfloat16, 256, 266)
    assert memory.offset_of(torch.zeros(3)) is None
    assert memory.allocate([0], dtype=torch.uint8) is None
    del tensors


def test_what_is_free_is_allocated_again_and_what_a_view_keeps_is_not():
    memory = heap_of_one_rank(4 * 64)
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


def test_a_transfer_does_not_keep_its_tensor():
    """Else it would be freed when messages are, which differs between ranks."""
    memory = heap_of_one_rank(64)
    tensor = memory.allocate([64], dtype=torch.uint8)
    transfer = Transfer(tensor, offset=memory.offset_of(tensor))
    del tensor
    assert places(memory, [64])[1] == [0]
    assert transfer.size == 64


def test_only_what_was_at_the_same_place_is_awaited():
    awaited = []
    peer = SimpleNamespace(frees=Frees(), announce_free=lambda number: None)
    peers = {1: peer}

    def wait(pairs):
        [(_, freed)] = pairs
        awaited.append(freed.is_done)
        peer.frees.announced.update(range(10))

    memory = SharedHeap(np.zeros(256, dtype=np.uint8), peers=peers, wait=wait)
    tensors, _ = places(memory, [64, 64])
    assert awaited == [True, True]
    del tensors
    peer.frees.announced.clear()
    peer.frees.announced.add(0)
    assert places(memory, [64])[1] == [0]
    assert awaited == [True, True, True]
    peer.frees.announced.clear()
    assert places(memory, [128])[1] == [0]
    assert awaited == [True, True, True, False]


def run_in_shared_heap(seed, steps, limit):
    """Checks random tensors, which a rank writes a part of, before they are freed; returns how many had no room."""
    launch = Launch.from_environment()
    chance = random.Random(seed)  # the same on all ranks
    delays = random.Random(launch.rank)
    missing = 0
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group, ranks, rank = dist.GroupMember.WORLD, launch.world_size, launch.rank
        connect(group, has_heap=True)
        memory = shared_heap_of(group.group_name)
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
        # What was allocated again is forgotten.
        assert all(len(peer.frees.announced) < steps / 2 for peer in streams_of(group.group_name).values())
    return missing


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_keep_their_values_until_they_are_freed(ranks):
    assert run_ranks(run_in_shared_heap, ranks, 1, 400, 1 << 12) == [0] * ranks
    found = run_ranks(run_in_shared_heap, ranks, 2, 60, HEAP_BYTES_PER_RANK // 4 // 3)
    assert found == [found[0]] * ranks
    assert 0 < found[0] < 50


def allocate_again_without_the_other_rank(seconds):
    """Returns the error of rank 0, which waits for what rank 1 does not free, as long as the group allows by then."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group = dist.new_group([0, 1], timeout=timedelta(minutes=10))
        connect(group, has_heap=True)
        set_group_timeout(group, timedelta(seconds=seconds))
        memory = shared_heap_of(group.group_name)
        large = [HEAP_BYTES_PER_RANK + 1]
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


def connected_under_limits(limits):
    """Returns how many ranks this one is connected with, and whether there is a shared heap, under limits of files."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        if limits[launch.rank] == 0:
            del os.memfd_create  # as on other systems than Linux
        elif limits[launch.rank] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[launch.rank], resource.RLIM_INFINITY))
        found = []
        for has_heap in (False, True):
            group = dist.new_group([*range(launch.world_size)])
            connect(group, has_heap=has_heap)
            found += [len(streams_of(group.group_name)), shared_heap_of(group.group_name) is not None]
        return found


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([None] * 3, [[2, False, 2, True]] * 3),
        ([None, 64 << 20, None], [[2, False, 2, False]] * 3),  # enough for messages
        ([None, None, 0], [[1, False, 1, False]] * 2 + [[0, False, 0, False]]),
        ([0, 0], [[0, False, 0, False]] * 2),
    ],
)
def test_ranks_have_a_shared_heap_where_all_can(limits, expected):
    assert run_ranks(connected_under_limits, len(limits), limits) == expected


def connected_from(folders):
    """Returns the ranks that this one is connected with, and whether there is a heap, where ranks see other files."""
    launch = Launch.from_environment()
    os.chdir(folders[launch.rank])
    tempfile.tempdir = "/proc/self/cwd"  # another folder for each rank
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group = dist.GroupMember.WORLD
        connect(group, has_heap=True)
        return sorted(streams_of(group.group_name)), shared_heap_of(group.group_name) is not None


def test_ranks_that_see_other_files_have_no_heap(tmp_path):
    """As those of containers on one machine."""
    folders = [tmp_path / name for name in ("first", "second", "first")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    assert run_ranks(connected_from, 3, folders) == [([2], False), ([], False), ([0], False)]


def descriptors_of_shared_memory():
    """Returns how many descriptors of shared memory this rank has when connected: one for each map of a memory."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        connect(dist.GroupMember.WORLD, has_heap=True)
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of the folder itself
                found += "memfd:torchtitan_clone" in os.readlink(f"/proc/self/fd/{name}")
        dist.barrier()
        return found


def test_connecting_leaves_no_descriptor_but_those_of_maps():
    assert run_ranks(descriptors_of_shared_memory, 3) == [2 * 2 + 1] * 3
