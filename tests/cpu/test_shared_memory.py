"""Tensors of any size pass through shared memory in order, and a rank that ends or is silent is an error."""

import gc
import os
import random
import resource
import socket
import tempfile
import threading
import time
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from torchtitan_clone.comm.collectives import reduce_scatter
from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.config import load_config
from torchtitan_clone.cpu.shared_memory import (
    _BUFFER_BYTES,
    MOST_BYTES_AT_ONCE,
    Stream,
    _machine,
    _open,
    close_streams,
    connect,
    streams_of,
    wait_for,
)
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group


def pair_of_streams(size):
    """Returns both ends of a stream, each with `size` bytes of memory, in this process."""
    connections = socket.socketpair()
    first, second = (np.zeros(size, dtype=np.uint8) for _ in range(2))
    return Stream(connections[0], own=first, others=second, other=1), Stream(
        connections[1], own=second, others=first, other=0
    )


@pytest.mark.parametrize("size", [1 << 16, 3 << 16, (5 << 16) + 12345])
def test_messages_of_any_size_arrive_in_order(size):
    chance = random.Random(size)
    ends = pair_of_streams(size)
    lengths = [chance.choice([0, 1, 77, 1000, 1 << 14, (1 << 16) + 3, 1 << 20]) for _ in range(120)]
    sent = [torch.randint(256, (length,), dtype=torch.uint8) for length in lengths]
    received = [[torch.zeros_like(tensor) for tensor in sent] for _ in ends]
    started = [[0, 0], [0, 0]]  # of each end: sent and received ones
    while any(count < len(sent) for counts in started for count in counts):
        end = chance.randrange(2)
        kind = chance.randrange(2)
        if (index := started[end][kind]) < len(sent):
            if kind == 0:
                ends[end].send(sent[index])
            else:
                ends[end].receive(received[end][index])
            started[end][kind] += 1
        if chance.random() < 0.7:
            ends[chance.randrange(2)].advance()
    while any([end.advance() for end in ends]):  # noqa: C419 - both
        pass
    for tensors in received:
        assert all(map(torch.equal, tensors, sent))
    for end in ends:
        end.close()


def test_a_socket_that_is_full_delays_and_loses_nothing():
    """Thousands of messages of a byte, of which the receiver reads none before the end."""
    first, second = pair_of_streams(1 << 16)
    sent = [torch.tensor([index % 256], dtype=torch.uint8) for index in range(20_000)]
    for tensor in sent:
        first.send(tensor)
        first.advance()
    assert first.has_unsent_pieces
    received = [torch.zeros(1, dtype=torch.uint8) for _ in sent]
    transfers = [second.receive(tensor) for tensor in received]
    while any([first.advance(), second.advance()]) or first.has_unsent_pieces:
        pass
    assert all(transfer.is_done for transfer in transfers)
    assert torch.cat(received).equal(torch.cat(sent))


def test_what_a_rank_sent_before_it_ended_arrives():
    """Also if it ends after this one has read records and before it acknowledges."""
    sent = [torch.full((1000,), float(number)) for number in range(20)]
    for _ in range(200):
        first, second = pair_of_streams(1 << 17)
        received = [torch.zeros(1000) for _ in sent]
        transfers = [second.receive(tensor) for tensor in received]

        def send_and_end(stream):
            for tensor in sent:
                stream.send(tensor)
                stream.advance()
            stream.close()

        sender = threading.Thread(target=send_and_end, args=(first,))
        sender.start()
        while second.advance() or not second.is_ended:
            pass
        sender.join()
        assert all(transfer.is_done for transfer in transfers)
        assert all(map(torch.equal, received, sent))


@pytest.mark.parametrize(("sent", "expected"), [(100, 10), (10, 100), (0, 10), (10, 0)])
def test_messages_of_other_sizes_are_an_error(sent, expected):
    first, second = pair_of_streams(1 << 16)
    first.send(torch.zeros(sent))
    first.send(torch.zeros(max(0, expected - sent)))
    first.advance()
    second.receive(torch.zeros(expected))
    rule = (
        f"sent a message of {4 * sent} bytes where this rank expects one of {4 * expected} bytes: the ranks do not run"
    )
    with pytest.raises(RuntimeError, match=rule):
        second.advance()


@pytest.mark.parametrize("offset", [0, 100, 3 << 20, (5 << 20) + 777, (13 << 20) + 1, (15 << 20) + 99])
def test_two_messages_have_a_place_wherever_they_start(offset):
    first, second = pair_of_streams(_BUFFER_BYTES)
    large = torch.zeros(MOST_BYTES_AT_ONCE, dtype=torch.uint8)
    for size in (offset, 1):  # the last byte, at the end of the offset, stays in the memory
        first.send(large.new_zeros(size))
        first.advance()
    second.receive(large.new_zeros(offset))
    second.advance()
    first.advance()
    transfers = [first.send(large), first.send(large)]
    first.advance()
    assert all(transfer.is_done for transfer in transfers)


def exchange_in_groups():
    """Returns the machine's ranks of each group, after exchanges that ranks wait for in different orders."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        other = 1 - launch.rank
        groups = [dist.GroupMember.WORLD, dist.new_group([0, 1])]
        transfers = []
        for number, group in enumerate(groups):
            connect(group)
            stream = streams_of(group.group_name)[other]
            # More than a group's memory: the rest moves only while ranks wait.
            data = torch.full((10 << 20,), float(10 * launch.rank + number))
            arriving = torch.zeros_like(data)
            transfers.append((arriving, [(stream, stream.receive(arriving)), (stream, stream.send(data))]))
            stream.advance()
        order = [0, 1] if launch.rank == 0 else [1, 0]
        for number in order:
            arriving, pair = transfers[number]
            wait_for(pair, seconds=60)
            assert (arriving == 10 * other + number).all()
        names = [group.group_name for group in groups]
        close_streams(names)
        return [dict(streams_of(name)) for name in names]


def test_ranks_may_wait_for_groups_in_different_orders():
    assert run_ranks(exchange_in_groups, 2, timeout=90) == [[{}, {}], [{}, {}]]


def wait_for_a_rank(does_end):
    """Waits on rank 0 for rank 1, which ends or sends nothing; returns the error and the seconds."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        connect(dist.GroupMember.WORLD)
        if launch.rank == 1:
            if does_end:
                close_streams([dist.GroupMember.WORLD.group_name])
            dist.barrier()
            return None
        stream = streams_of(dist.GroupMember.WORLD.group_name)[1]
        start = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            wait_for([(stream, stream.receive(torch.zeros(10)))], seconds=60 if does_end else 2)
        dist.barrier()
        return str(error.value), time.monotonic() - start


def test_a_rank_that_ended_is_an_error():
    (message, seconds), _ = run_ranks(wait_for_a_rank, 2, True, timeout=50)
    assert message == "rank 1 of the group has ended during a collective"
    assert seconds < 40


def test_a_closed_group_is_an_error_and_no_wait():
    first, _ = pair_of_streams(1 << 16)
    transfer = first.receive(torch.zeros(10))
    first.close()
    with pytest.raises(RuntimeError, match="rank 1 of the group has ended"):
        wait_for([(first, transfer)], seconds=100)


def send_many_before_the_other_rank_reads(count):
    """Sends more messages than a socket has records, then meets the other rank in a collective of gloo."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        connect(dist.GroupMember.WORLD)
        stream = streams_of(dist.GroupMember.WORLD.group_name)[1 - launch.rank]
        tensors = [torch.full((64,), float(index * (1 - launch.rank))) for index in range(count)]
        if launch.rank == 0:
            wait_for([(stream, stream.send(tensor)) for tensor in tensors], seconds=60)
        else:
            time.sleep(1)
            wait_for([(stream, stream.receive(tensor)) for tensor in tensors], seconds=60)
        dist.barrier()
        return all(bool((tensor == index).all()) for index, tensor in enumerate(tensors))


def test_a_rank_that_has_waited_has_announced_all():
    assert run_ranks(send_many_before_the_other_rank_reads, 2, 1000, timeout=50) == [True, True]


def test_a_rank_that_sends_nothing_is_an_error_after_the_time():
    (message, seconds), _ = run_ranks(wait_for_a_rank, 2, False, timeout=50)
    assert message == "timed out after 2 s: waited in a collective for rank 1 of the group"
    assert 2 <= seconds < 40


def connected_ranks(temporary):
    """Returns the ranks that this one is connected with, where `temporary` has each rank's folder for sockets."""
    launch = Launch.from_environment()
    tempfile.tempdir = temporary[launch.rank]
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            connect(dist.GroupMember.WORLD)
            gc.collect()
        assert not caught, caught[0].message  # a folder or a socket that only its finalizer closes
        dist.barrier()
        return sorted(streams_of(dist.GroupMember.WORLD.group_name)), os.listdir(temporary[launch.rank])


def test_ranks_connect_where_they_can_and_leave_no_file(tmp_path):
    assert run_ranks(connected_ranks, 3, [str(tmp_path)] * 3) == [([1, 2], []), ([0, 2], []), ([0, 1], [])]
    # A path of more characters than a socket can have.
    long = tmp_path / ("x" * 100)
    long.mkdir()
    folders = [str(tmp_path), str(long), str(tmp_path)]
    assert [ranks for ranks, _ in run_ranks(connected_ranks, 3, folders)] == [[2], [], [0]]


def connected_under_a_limit():
    """Returns the ranks that this one is connected with, where rank 1 can not make large files; sums by any means."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        if launch.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        connect(dist.GroupMember.WORLD)
        total = reduce_scatter([torch.tensor([launch.rank + 1.0])] * 3, group=dist.GroupMember.WORLD)
        return sorted(streams_of(dist.GroupMember.WORLD.group_name)), total.item()


def test_a_rank_without_memory_to_share_uses_gloo():
    assert run_ranks(connected_under_a_limit, 3) == [([2], 6.0), ([], 6.0), ([0], 6.0)]


def open_files():
    """Returns what the descriptors of this process refer to; gloo may close its own at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def connect_with_another_version():
    """Returns the error of rank 1, and how many more descriptors it has, where rank 0 sends no memory."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group = dist.GroupMember.WORLD
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            if launch.rank == 0:
                listener.bind(os.path.join(folder, "socket"))
                listener.listen()
                all_gather_json([_machine(), listener.getsockname()], group=group)
                all_gather_json([], group=group)  # the ranks that this one has called
                connection, _ = listener.accept()
                connection.recv(8)
                connection.send(bytes(8))
                connection.close()
                return None
            listener.close()
            before = open_files()
            with pytest.raises(RuntimeError) as caught:
                connect(group)
        message = str(caught.value)
        del caught
        gc.collect()
        return message, len(open_files() - before)


NO_MEMORY = "a rank on this machine has ended while the ranks connected, or has another version"


def test_a_rank_of_another_version_is_an_error_and_leaves_no_descriptor():
    assert run_ranks(connect_with_another_version, 2) == [None, (NO_MEMORY, 0)]


def test_a_rank_that_ends_while_ranks_connect_is_an_error():
    connection, other = socket.socketpair()
    other.close()
    before = len(os.listdir("/proc/self/fd"))
    with connection, pytest.raises(RuntimeError, match=NO_MEMORY):
        _open(connection, rank=0, seconds=1)
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the connection
