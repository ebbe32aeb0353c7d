"""What a peer sends to a replica group that recovers is not believed: torchtitan_clone/torchft/connection.py."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from torchtitan_clone.checkpoint.progress import parse_progress
from torchtitan_clone.documents import DocumentError, Value

torchft = pytest.importorskip("torchft")

from torchft.process_group import ProcessGroupGloo  # noqa: E402

from torchtitan_clone.torchft.connection import PeerTransport, ReplicaMismatchError  # noqa: E402

TIMEOUT = timedelta(seconds=60)
TENSORS = {"w": torch.arange(6.0)}
PROGRESS = {"step": 7, "tokens_seen": 70, "skipped_steps": 0, "data": {"samples": 56}}
STATE = {"torchft": {"step": 7, "batches_committed": 14}, "user": {"training": PROGRESS}}


@pytest.fixture(scope="module")
def groups():
    """Returns the two ends of a connection over real sockets."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        address = f"127.0.0.1:{store.port}/test"
        for done in [threads.submit(end.configure, address, str(rank), rank, 2) for rank, end in enumerate(ends)]:
            done.result(60)
    yield ends
    for end in ends:
        end.abort()


def transport(group):
    return PeerTransport(group, tensors={name: tensor.clone() for name, tensor in TENSORS.items()}, device="cpu")


def exchange(groups, send):
    """Runs `send` at one end and recovers at the other."""
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send, groups[0])
        try:
            return transport(groups[1]).recv_checkpoint(0, "none", 7, TIMEOUT)
        finally:
            sent.result(60)


def send_header(content, *, length=None):
    def send(group):
        group.send([torch.tensor([len(content) if length is None else length])], 1, 0).wait(TIMEOUT)
        if length is None:
            group.send([torch.frombuffer(bytearray(content), dtype=torch.uint8)], 1, 0).wait(TIMEOUT)

    return send


def header(groups, **changes):
    return {"step": 7, "layout": transport(groups[0])._layout_digest, "state": STATE} | changes


def test_an_honest_peer(groups):
    state = exchange(groups, lambda group: transport(group).send_checkpoint([1], 7, STATE, TIMEOUT))
    assert state == STATE
    assert parse_progress(Value(state["user"]["training"], where="peer")).step == 7


@pytest.mark.parametrize("length", [0, -1, 2**31, 2**62])
def test_lengths(groups, length):
    """A length was allocated as announced: 2**62 bytes."""
    with pytest.raises(DocumentError, match="announces a header of"):
        exchange(groups, send_header(b"", length=length))


def test_headers(groups):
    texts = [b"[" * 200_000, b"9" * 5000, b"{}", b"[]", b"null", b"\xff\xfe", b'{"step": 1e400}']
    changes = [
        {"step": 8}, {"step": "7"}, {"step": 2**70}, {"layout": 7}, {"state": []}, {"other": 1}, {"state": {}},
        {"state": STATE | {"torchft": {"step": "7", "batches_committed": 1}}}, {"state": STATE | {"torchft": []}},
        {"state": STATE | {"user": {}}}, {"state": STATE | {"user": {"training": []}}},
        {"state": {"user": STATE["user"]}},
    ]  # fmt: skip
    for text in [*texts, *(json.dumps(header(groups, **change)).encode() for change in changes)]:
        with pytest.raises(DocumentError):
            exchange(groups, send_header(text))
    with pytest.raises(ReplicaMismatchError):
        exchange(groups, send_header(json.dumps(header(groups, layout="other")).encode()))


CHANGES = [
    {"step": -1}, {"step": "7"}, {"tokens_seen": 2**70}, {"skipped_steps": 8}, {"data": 1}, {"other": 1},
    {"spikes": {"losses": [1.0]}},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_progress_of_a_peer(change):
    with pytest.raises(DocumentError, match="peer"):
        parse_progress(Value(PROGRESS | change, where="peer"))
