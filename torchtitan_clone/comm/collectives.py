"""Collectives on a CPU as messages between pairs of ranks, which go on while a rank computes.

gloo sends and receives them. Between ranks that a Transport connects, that does: the package behind the door `cpu`
has one through the memory of a machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone import doors
from torchtitan_clone.torch_compat import (
    Operator,
    all_gather_single,
    group_timeout,
    is_fake,
    process_group_of,
    reduce_scatter_single,
)

_TAG = 0x6A
"""Tag of messages."""
T = TypeVar("T")
Addressed = Sequence[tuple[int, Tensor]]
"""Tensors, each with the rank of the group that sends or receives it."""


class Transfer(Protocol):
    """A tensor on its way."""

    @property
    def is_done(self) -> bool: ...


class Stream(Protocol):
    """Both directions between this rank and another one of a group; tensors arrive in the order they are sent in."""

    def send(self, tensor: Tensor) -> Transfer:
        """Sends a contiguous tensor, which must not change before the transfer is done."""
        ...

    def receive(self, tensor: Tensor) -> Transfer:
        """Receives the next tensor of the other rank, of as many bytes, into a contiguous one."""
        ...

    def advance(self) -> bool:
        """Moves what can be moved without waiting; returns whether it did."""
        ...


class Transport(Protocol):
    """What moves messages between some ranks instead of gloo."""

    MOST_BYTES_AT_ONCE: int
    """Two messages of at most so many bytes move while both ranks compute; the rest of larger ones may have to wait."""

    def connect(self, group: dist.ProcessGroup) -> None:
        """Connects those ranks of a group that it can; a collective."""

    def streams_of(self, group_name: str) -> Mapping[int, Stream]:
        """Returns the streams of a group by the other rank; the other ranks are gloo's."""
        ...

    def wait_for(self, transfers: Sequence[tuple[Stream, Transfer]], *, seconds: float) -> None:
        """Waits until transfers of these streams are done. RuntimeError if a rank has ended or takes too long."""

    def close_streams(self, groups: Iterable[str]) -> None:
        """Closes the connections of groups that are destroyed, by torch's names of them."""


_TRANSPORT = cast("Transport | None", doors.find("cpu"))


def connect(group: dist.ProcessGroup) -> None:
    """Connects the ranks of a group of gloo by the transport, if there is one; a collective."""
    if _TRANSPORT is not None:
        _TRANSPORT.connect(group)


def disconnect(groups: Iterable[dist.ProcessGroup]) -> None:
    """Closes the connections of groups that are destroyed."""
    if _TRANSPORT is not None:
        _TRANSPORT.close_streams([group.group_name for group in groups])


def moves_in_background(x: Tensor) -> bool:
    """Whether a message of this tensor is better sent by the transport: larger ones gloo moves while ranks compute."""
    return _TRANSPORT is not None and x.numel() * x.element_size() <= _TRANSPORT.MOST_BYTES_AT_ONCE


def uses_messages(x: Tensor) -> bool:
    """Whether ranks exchange this tensor by messages: on a CPU, and not in a simulated run, which is one of a GPU."""
    return x.device.type == "cpu" and (torch.compiler.is_compiling() or not is_fake(x))


class Messages(dist.Work):
    """Messages of one collective that are sent and received."""

    def __init__(
        self, works: Sequence[dist.Work], *, transfers: Sequence[tuple[Stream, Transfer]], timeout: timedelta
    ) -> None:
        super().__init__()
        self._works = works
        self._transfers = transfers
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until all messages are complete; RuntimeError if a rank has ended or takes too long."""
        timeout = timeout or self._timeout
        if _TRANSPORT is not None:
            _TRANSPORT.wait_for(self._transfers, seconds=timeout.total_seconds())
        for work in self._works:
            if not work.is_completed():  # has not been waited for, which gloo allows once
                work.wait(timeout)
        return True


_started = dict[int, Messages]()
"""Those that the operator has started, until start_exchange() takes them."""
# An operator, so that dispatch modes see each collective, with its bytes and its group.
_SCHEMA = (
    "(Tensor[] sent, int[] targets, Tensor(a!)[] received, int[] sources, str group_name, int own_bytes, "
    "bool is_awaited, str collective) -> int"
)
torch.library.define("torchtitan_clone::exchange", _SCHEMA)


@torch.library.impl("torchtitan_clone::exchange", "CPU")
def _exchange(
    sent: Sequence[Tensor], targets: Sequence[int], received: Sequence[Tensor], sources: Sequence[int],
    group_name: str, _own_bytes: int, _is_awaited: bool, _collective: str,
) -> int:  # fmt: skip
    group = process_group_of(group_name)
    streams = {} if _TRANSPORT is None else _TRANSPORT.streams_of(group_name)
    works: list[dist.Work | None] = []
    transfers: list[tuple[Stream, Transfer]] = []
    for source, tensor in zip(sources, received, strict=True):
        if (stream := streams.get(source)) is not None:
            transfers.append((stream, stream.receive(tensor)))
        else:
            works.append(dist.irecv(tensor, group=group, group_src=source, tag=_TAG))
    for target, tensor in zip(targets, sent, strict=True):
        if (stream := streams.get(target)) is not None:
            transfers.append((stream, stream.send(tensor)))
            stream.advance()
        else:
            works.append(dist.isend(tensor, group=group, group_dst=target, tag=_TAG))
    # Without a timeout, gloo waits for a message as long as the group allowed when it was created.
    timeout = group_timeout(group, device=torch.device("cpu"))
    started = Messages([work for work in works if work is not None], transfers=transfers, timeout=timeout)
    _started[id(started)] = started
    return id(started)


def is_exchange(func: Operator) -> bool:
    """Whether this operator starts a collective by messages.

    Its last three arguments are the bytes of this rank's own part, which no message has, whether it is known to be
    waited for at once, and the name of the collective.
    """
    return func is torch.ops.torchtitan_clone.exchange.default


def messages_of(ticket: object) -> Messages:
    """Returns the messages that an exchange started, by its result."""
    assert isinstance(ticket, int)
    return _started[ticket]


@torch.no_grad()
def start_exchange(
    sent: Addressed, received: Addressed, *, group: dist.ProcessGroup, collective: str, own: Sequence[Tensor] = (),
    is_awaited: bool = False,
) -> Messages:  # fmt: skip
    """Sends tensors to other ranks of a group, and receives from others; all are contiguous, and on a CPU.

    Each rank that sends here must send as many bytes as its tensor here has, and several tensors in the order in which
    they are received. Tensors can not be resized afterwards.
    The others are for traces: `collective` is what this is part of, `own` is the part of it that this rank keeps,
    `is_awaited` says that the caller waits at once.
    """
    tensors = [x for _, x in sent], [rank for rank, _ in sent], [x for _, x in received], [rank for rank, _ in received]
    own_bytes = sum(x.numel() * x.element_size() for x in own)
    ticket = torch.ops.torchtitan_clone.exchange(*tensors, group.group_name, own_bytes, is_awaited, collective)
    return _started.pop(ticket)


def others(parts: Sequence[T], *, group: dist.ProcessGroup) -> list[tuple[int, T]]:
    """Returns the parts, one of each rank of a group, with their ranks without this one, from the next rank on."""
    ranks = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    return [(rank, parts[rank]) for rank in ranks]


def start_all_to_all(
    parts: Sequence[Tensor], *, group: dist.ProcessGroup, collective: str, is_awaited: bool = False
) -> tuple[Sequence[Tensor], Messages]:
    """Starts to send parts[rank] to each rank; returns what each rank sends to this one, and what to wait for."""
    rank = group.rank()
    received = [
        part if source == rank else torch.empty_like(parts[rank], memory_format=torch.contiguous_format)
        for source, part in enumerate(parts)
    ]
    sent = [(target, part.contiguous()) for target, part in others(parts, group=group)]
    arguments = {"group": group, "collective": collective, "own": [parts[rank]], "is_awaited": is_awaited}
    return received, start_exchange(sent, others(received, group=group), **arguments)


def all_to_all(parts: Sequence[Tensor], *, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Sends parts[rank] to each rank; returns what each rank sends to this one."""
    received, messages = start_all_to_all(parts, group=group, collective="all_to_all", is_awaited=True)
    messages.wait()
    return received


def exchange_parts(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> list[Tensor]:
    """Sends x[rank] of each tensor to each rank, in one exchange; returns what ranks send to this one [ranks, ...]."""
    received = [x.new_empty(x.shape) for x in tensors]
    to = [(rank, part.contiguous()) for x in tensors for rank, part in others([*x], group=group)]
    source = [(rank, part) for x in received for rank, part in others([*x], group=group)]
    own = [x[group.rank()] for x in tensors]
    messages = start_exchange(to, source, group=group, collective="all_to_all", own=own, is_awaited=True)
    for x, part in zip(received, own, strict=True):
        x[group.rank()] = part
    messages.wait()
    return received


@torch.library.custom_op("torchtitan_clone::exchange_slices", mutates_args=())
def exchange_slices(x: Tensor, group_name: str) -> Tensor:
    """Returns exchange_parts() of one tensor: an operator that a compiled region can contain."""
    return exchange_parts([x], group=process_group_of(group_name))[0]


@exchange_slices.register_fake
def _empty_slices(x: Tensor, _group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def all_gather(part: Tensor, *, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the part of each rank, all of one shape."""
    if dist.get_backend(group) != "gloo":
        gathered = part.new_empty(group.size(), *part.shape)
        all_gather_single(gathered, part, group=group)
        return [*gathered]
    part = part.contiguous()
    parts = [part if source == group.rank() else torch.empty_like(part) for source in range(group.size())]
    received = others(parts, group=group)
    sent = [(target, part) for target, _ in received]
    start_exchange(sent, received, group=group, collective="all_gather", own=[part], is_awaited=True).wait()
    return parts


def reduce_scatter(parts: Sequence[Tensor], *, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of all ranks' parts that belong to this rank, in the order of ranks."""
    if dist.get_backend(group) != "gloo":
        total = torch.empty_like(parts[0])
        reduce_scatter_single(total, torch.stack(list(parts)), group=group)
        return total
    received, messages = start_all_to_all(parts, group=group, collective="reduce_scatter", is_awaited=True)
    messages.wait()
    return sum_parts(received, out=torch.empty_like(parts[0], memory_format=torch.contiguous_format))


class StartedSum:
    """Sums a contiguous tensor over two or more ranks of a CPU in place: each sums a part of it, which all gather.

    A rank adds to its own part those of the next ranks, in their order. All ranks call start_gather(), or wait(), in
    one order among the collectives of the group.
    """

    def __init__(self, x: Tensor, *, group: dist.ProcessGroup) -> None:
        self._group = group
        self._parts: Sequence[Tensor] = x.view(-1).tensor_split(group.size())
        self._received, self._messages = start_all_to_all(self._parts, group=group, collective="reduce_scatter")

    @torch.no_grad()
    def start_gather(self) -> None:
        """Waits until this rank can sum its part, and sends that, unless it has."""
        if not self._parts:
            return
        self._messages.wait()
        own = self._parts[self._group.rank()]
        for _, part in others(self._received, group=self._group):
            own.add_(part)
        received = others(self._parts, group=self._group)
        sent = [(target, own) for target, _ in received]
        self._messages = start_exchange(sent, received, group=self._group, collective="all_gather", own=[own])
        self._parts, self._received = [], []

    def wait(self) -> None:
        """Waits until the tensor is the sum."""
        self.start_gather()
        self._messages.wait()


def sum_parts(parts: Sequence[Tensor], *, out: Tensor) -> Tensor:
    """Writes the sum of two or more tensors of one shape to `out`, in their order, and returns it."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out
