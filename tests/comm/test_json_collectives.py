"""Values that ranks exchange as JSON: what arrives, and what is refused."""

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoint_states import rank_of_a_group
from tests.support.harness import run_ranks
from torchtitan_clone.comm.json_collectives import (
    all_gather_json,
    broadcast_json,
    gather_json,
    optional_text,
    scatter_json,
)
from torchtitan_clone.documents import DocumentError
from torchtitan_clone.ops.dtensor_shards import TensorShard, shards_from_json, shards_to_json

VALUES = [None, {"a": [1, 2.5, "ä", True]}, "x" * 5000]
SHARD = TensorShard(
    offset=(2, 0), size=(1, 3), global_shape=torch.Size([4, 3]), dtype=torch.bfloat16, device_type="cpu"
)


def exchange():
    """Returns what this rank receives in each collective, from ranks with values of different sizes."""
    with rank_of_a_group():
        rank = dist.get_rank()
        everything = VALUES if rank == 0 else []
        values = [*all_gather_json(VALUES[rank]), *gather_json(VALUES[rank]), scatter_json(everything)]
        return [value.value for value in [*values, broadcast_json(VALUES[2 - rank])]]


def test_every_rank_receives_the_values_that_were_sent():
    first, *others = run_ranks(exchange, 3)
    assert first == [*VALUES, *VALUES, VALUES[0], VALUES[2]]
    assert others == [[*VALUES, VALUES[1], VALUES[2]], [*VALUES, VALUES[2], VALUES[2]]]


def receive(sent: bytes, size: int):
    """Sends bytes from rank 1 as another program could; returns the error of rank 0."""
    with rank_of_a_group():
        if dist.get_rank() == 0:
            try:
                return [value.text() for value in all_gather_json("own")]
            except DocumentError as error:
                return str(error)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(sizes, torch.tensor([size]))
        if 0 < size <= 100:
            padded = torch.zeros(size, dtype=torch.uint8)
            padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
        return None


@pytest.mark.parametrize(
    ("sent", "size", "problem"),
    [
        (b"\x80\x04\x95", 9, "value of rank 1: not valid JSON"),
        (b"[" * 100, 100, "value of rank 1: "),
        (b"123456789", 9, "value of rank 1 = 123456789: must be a string"),
        (b"", 1 << 62, "a rank sent a value of 4,611,686,018,427,387,904 bytes"),
        (b"", -1, "a rank sent a value of "),
    ],
)
def test_what_is_no_value_of_the_expected_type_is_refused(sent, size, problem):
    answer, _ = run_ranks(receive, 2, sent, size)
    assert answer.startswith(problem)


def test_shards_arrive_as_they_were_sent():
    (received,) = broadcast_like(shards_to_json({"weight": SHARD}))
    assert shards_from_json(received) == {"weight": SHARD}


def broadcast_like(value):
    """Returns a value after it was sent by the only rank of a group."""
    return run_ranks(send_to_itself, 1, value)


def send_to_itself(value):
    with rank_of_a_group():
        return broadcast_json(value)


@pytest.mark.parametrize(
    "changes", [{0: [4, 0]}, {0: [-1, 0]}, {1: [1]}, {1: [2**70, 1]}, {2: "a"}, {3: "torch.load"}, {4: 1}]
)
def test_a_shard_outside_its_tensor_is_refused(changes):
    sent = SHARD.to_json()
    for position, value in changes.items():
        sent[position] = value
    (received,) = broadcast_like(sent)
    with pytest.raises(DocumentError):
        TensorShard.from_json(received)


def test_messages_are_text_or_none():
    (none,), (text,), (number,) = (broadcast_like(value) for value in (None, "disk full", 3))
    assert (optional_text(none), optional_text(text)) == (None, "disk full")
    with pytest.raises(DocumentError):
        optional_text(number)
