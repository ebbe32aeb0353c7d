"""Exchanges tensors between ranks of one machine through shared memory: their bytes pass no socket and no thread.

Each of two ranks writes pieces to a buffer that the other one maps, and announces them over a Unix socket; the other
one copies and acknowledges them. The buffer has no name, so that the kernel frees it with the processes. Bytes move
while a rank starts an exchange or waits for one, in the order in which exchanges between the two ranks of a group
start. Requires Linux.
"""

import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.torch_compat import group_timeout

_BUFFER_BYTES = 16 << 20
"""Size of the buffer that a rank writes to for another one. Pages that no message has used take no memory."""
_PIECE_BYTES = 2 << 20
"""Bytes that are announced at once, so that two ranks copy a large tensor at the same time."""
_MIN_PIECE_BYTES = 64 << 10
MOST_BYTES_AT_ONCE = _BUFFER_BYTES // 2 - 2 * _MIN_PIECE_BYTES
"""Two messages of at most so many bytes have a place at once; the rest of larger ones may have to wait for it."""
_MAX_RANKS = 1024
"""Ranks on one machine that may connect at the same time."""
_RECORD = struct.Struct("<qqq")
"""Announces a piece by its start, its size and the size of its message; or acknowledges pieces:"""
_ACKNOWLEDGED = -1
"""The number of pieces that were copied; 0."""
Bytes = npt.NDArray[np.uint8]
"""Moved without operators of torch, which dispatch modes of the caller would see."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
_HELLO = struct.Struct("<q")


class Transfer:
    """Bytes of a tensor that are sent or received; those that are not yet moved are in `rest`."""

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.nbytes
        self.rest: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
        self._has_begun = False

    @property
    def is_done(self) -> bool:
        return self._has_begun and self.rest.size == 0

    def take(self, size: int) -> Bytes:
        """Returns the next bytes, which are moved then."""
        self._has_begun = True
        piece, self.rest = self.rest[:size], self.rest[size:]
        return piece


class Stream:
    """Both directions between this rank and another one of a group."""

    def __init__(self, connection: socket.socket, *, own: Bytes, others: Bytes, other: int) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.other = other
        self.is_ended = False
        self._own = own
        self._others = others
        self._pieces = deque[tuple[int, int]]()
        """Start and size of those in this rank's buffer that the other one has not acknowledged."""
        self._arrived = deque[tuple[int, int, int]]()
        """Records of the other rank's pieces that this one has not read."""
        self._sending = deque[Transfer]()
        self._receiving = deque[Transfer]()
        self._unread = b""
        self._unsent = bytearray()
        self._unsent_pieces = 0
        """Bytes of `_unsent` up to the end of the last record of a piece."""
        self._unacknowledged = 0
        """Number of pieces of the other rank that this one has copied since its last acknowledgement."""

    @property
    def has_unsent_pieces(self) -> bool:
        """Whether the socket was full when a piece was to be announced."""
        return self._unsent_pieces > 0

    @property
    def has_unsent_records(self) -> bool:
        """Whether the socket was full when a record was to be sent."""
        return bool(self._unsent or self._unacknowledged)

    def send(self, tensor: Tensor) -> Transfer:
        """Sends a contiguous tensor, which must not change before the transfer is done."""
        transfer = Transfer(tensor)
        self._sending.append(transfer)
        return transfer

    def receive(self, tensor: Tensor) -> Transfer:
        """Receives the next tensor of the other rank, of as many bytes, into a contiguous one."""
        transfer = Transfer(tensor)
        self._receiving.append(transfer)
        return transfer

    def advance(self) -> bool:
        """Moves what can be moved without waiting; returns whether it did."""
        self._read_records()
        has_moved = False
        while self._push() | self._pull():
            self._send_records()
            has_moved = True
        self._send_records()  # which an earlier call could not
        return has_moved

    def close(self) -> None:
        self.is_ended = True
        self.connection.close()

    def _push(self) -> bool:
        """Writes a piece of the tensor that is sent, if there is memory for it."""
        while self._sending and self._sending[0].is_done:
            self._sending.popleft()
        if not self._sending:
            return False
        wanted = min(self._sending[0].rest.size, _PIECE_BYTES)
        start, room = self._room(wanted)
        size = min(wanted, room)
        if size < min(wanted, _MIN_PIECE_BYTES):
            return False
        transfer = self._sending[0]
        self._own[start : start + size] = transfer.take(size)
        if size:  # an empty message has a record only
            self._pieces.append((start, size))
        self._unsent += _RECORD.pack(start, size, transfer.size)
        self._unsent_pieces = len(self._unsent)
        return True

    def _room(self, wanted: int) -> tuple[int, int]:
        """Returns where the next piece starts, and the bytes that are free there."""
        if not self._pieces:
            return 0, len(self._own)
        first, (last, size) = self._pieces[0][0], self._pieces[-1]
        end = last + size
        if last < first:  # the pieces go on at the start of the memory
            return end, first - end
        at_end = len(self._own) - end
        return (end, at_end) if at_end >= min(wanted, _MIN_PIECE_BYTES) else (0, first)

    def _pull(self) -> bool:
        """Copies a piece of the tensor that is received, if it has arrived."""
        while self._receiving and self._receiving[0].is_done:
            self._receiving.popleft()
        if not (self._receiving and self._arrived):
            return False
        start, size, whole = self._arrived.popleft()
        transfer = self._receiving[0]
        is_there = 0 <= size <= transfer.rest.size and start <= len(self._others) - size
        if whole != transfer.size or not is_there:
            raise RuntimeError(
                f"rank {self.other} of the group sent a message of {whole:,} bytes where this rank expects one of "
                f"{transfer.size:,} bytes: the ranks do not run the same collectives; compare their versions and "
                "options"
            )
        transfer.take(size)[:] = self._others[start : start + size]
        self._unacknowledged += size > 0
        return True

    def _read_records(self) -> None:
        while not self.is_ended:
            try:
                received = self.connection.recv(1 << 12)
            except BlockingIOError:
                break
            except ConnectionError:
                received = b""
            self.is_ended = not received
            self._unread += received
        whole = len(self._unread) // _RECORD.size * _RECORD.size
        for start, size, message in _RECORD.iter_unpack(self._unread[:whole]):
            if start >= 0:
                self._arrived.append((start, size, message))
            else:
                for _ in range(min(size, len(self._pieces))):
                    self._pieces.popleft()
        self._unread = self._unread[whole:]

    def _send_records(self) -> None:
        try:
            while self.has_unsent_records:
                if not self._unsent:  # one record for all pieces that have been copied since the last one
                    self._unsent += _RECORD.pack(_ACKNOWLEDGED, self._unacknowledged, 0)
                    self._unacknowledged = 0
                count = self.connection.send(self._unsent)
                del self._unsent[:count]
                self._unsent_pieces = max(0, self._unsent_pieces - count)
        except BlockingIOError:
            pass
        except ConnectionError:  # what the other rank sent before it ended is still to be read
            self._unsent.clear()
            self._unsent_pieces = self._unacknowledged = 0


_streams: dict[str, dict[int, Stream]] = {}
"""Of each group by torch's name of it, by the other rank."""


def streams_of(group_name: str) -> Mapping[int, Stream]:
    """Returns the streams of a group by the other rank, to ranks on this machine if the group is connected."""
    return _streams.get(group_name, {})


def close_streams(groups: Iterable[str]) -> None:
    """Closes the connections of groups that are destroyed, by torch's names of them."""
    for name in groups:
        for stream in _streams.pop(name, {}).values():
            stream.close()


def wait_for(transfers: Sequence[tuple[Stream, Transfer]], *, seconds: float) -> None:
    """Moves bytes of all groups until the transfers are done and announced.

    Raises RuntimeError if one of their ranks has ended, or if they are not done within `seconds`.
    """
    limit = time.monotonic() + seconds
    # Those of other groups too, for which other ranks may wait before they come here.
    streams = [stream for group in _streams.values() for stream in group.values()]
    while pending := [stream for stream, transfer in transfers if not transfer.is_done or stream.has_unsent_pieces]:
        has_moved = [stream.advance() for stream in streams]
        if any(has_moved):
            continue
        for stream in pending:
            if stream.is_ended:
                raise RuntimeError(f"rank {stream.other} of the group has ended during a collective")
        rest = limit - time.monotonic()
        if rest <= 0:
            others = ", ".join(str(stream.other) for stream in dict.fromkeys(pending))
            raise RuntimeError(f"timed out after {seconds:g} s: waited in a collective for rank {others} of the group")
        poll = select.poll()
        for stream in streams:
            if not stream.is_ended:
                poll.register(stream.connection, select.POLLIN | (select.POLLOUT if stream.has_unsent_records else 0))
        poll.poll(rest * 1000)


def connect(group: dist.ProcessGroup) -> None:
    """Connects the ranks of a group of gloo that are on the same machine and see the same files; a collective."""
    if group.group_name in _streams:
        return
    rank, seconds = group.rank(), _timeout_seconds(group)
    with ExitStack() as stack:
        listener = _listen(stack)
        own = [_machine(), listener.getsockname() if listener else ""]
        found = [[x.text() for x in place.items(count=2)] for place in all_gather_json(own, group=group)]
        on_machine = [other for other in range(rank) if all(own) and found[other][0] == own[0] and found[other][1]]
        called = {other: end for other in on_machine if (end := _call(found[other][1])) is not None}
        calls = [value.integers(high=group.size() - 1) for value in all_gather_json([*called], group=group)]
        opened = stack.enter_context(ExitStack())  # closes connections after an error
        connections = [opened.enter_context(connection) for connection in called.values()]
        if listener is not None:
            listener.settimeout(seconds)
            connections += [opened.enter_context(listener.accept()[0]) for others in calls if rank in others]
        streams = [_open(each, rank=rank, seconds=seconds) for each in connections]
        opened.pop_all()
        _streams[group.group_name] = {stream.other: stream for stream in streams}


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    return group_timeout(group, device=torch.device("cpu")).total_seconds()


def _listen(stack: ExitStack) -> socket.socket | None:
    """Returns a socket that ranks of the same user can find until the stack ends; None where that is impossible."""
    if not _can_share_memory():
        return None
    with suppress(OSError):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(os.path.join(folder, "socket"))  # an error if the path has over 107 characters
        listener.listen(_MAX_RANKS)
        return listener
    return None


def _can_share_memory() -> bool:
    """Whether this process can make a buffer, which other systems than Linux, or `ulimit -f`, forbid."""
    with suppress(OSError, AttributeError), ExitStack() as stack:
        descriptor = os.memfd_create("torchtitan_clone")
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, _BUFFER_BYTES)
        return True
    return False


def _machine() -> str:
    """Returns what differs between machines, and between starts of one; nothing where it is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _call(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError):
        connection.connect(path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.geteuid():  # the path came from a network
            return connection
    connection.close()
    return None


def _open(connection: socket.socket, *, rank: int, seconds: float) -> Stream:
    """Exchanges ranks and memory with the other end; returns the stream."""
    connection.settimeout(seconds)
    memory = os.memfd_create("torchtitan_clone")
    hello, received = b"", list[int]()
    try:
        os.ftruncate(memory, _BUFFER_BYTES)
        with suppress(ConnectionError):
            socket.send_fds(connection, [_HELLO.pack(rank)], [memory])
            hello, received, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        if len(hello) != _HELLO.size or [*map(_size_of, received)] != [_BUFFER_BYTES]:
            raise RuntimeError("a rank on this machine has ended while the ranks connected, or has another version")
        (other,) = _HELLO.unpack(hello)
        return Stream(connection, own=_mapped(memory), others=_mapped(received[0]), other=other)
    finally:
        for descriptor in (memory, *received):
            os.close(descriptor)


def _size_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _mapped(descriptor: int) -> Bytes:
    """Maps all of a memory, which lasts as long as what is returned."""
    return np.frombuffer(mmap.mmap(descriptor, 0), dtype=np.uint8)
