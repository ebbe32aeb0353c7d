"""A heap in memory that all ranks of a group map: what one rank writes to a tensor, the others read where it is.

As in a symmetric heap, all ranks allocate the same sizes in the same order, and free tensors in the same order in
relation to that. So each knows where a tensor of the others is, which no message has to say. A rank writes to memory
that it allocates again when all others have freed what they had there.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HEAP_BYTES_PER_RANK = 64 << 20
"""Size of the heap of a group, for each rank. Pages that no tensor has used take no memory."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Frees:
    """Numbers of tensors that another rank has freed, and of those that this one has freed without telling it."""

    announced: set[int] = field(default_factory=set)
    unannounced: deque[int] = field(default_factory=deque)


class Peer(Protocol):
    """The connection with another rank of the group."""

    frees: Frees

    def announce_free(self, number: int) -> None: ...


class _Freed:
    """Awaits that a peer has freed some tensors."""

    def __init__(self, peer: Peer, numbers: Set[int]) -> None:
        self._peer = peer
        self._numbers = numbers

    @property
    def is_done(self) -> bool:
        return self._numbers <= self._peer.frees.announced


class SharedHeap:
    """The heap of a group; `wait` takes pairs of a peer and what is awaited of it."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], *, peers: Mapping[int, Peer], wait: Callable[..., object]
    ) -> None:
        self._memory = memory
        self._start = memory.ctypes.data
        self._peers = peers
        self._wait = wait
        self._count = 0
        self._places: dict[int, range] = {}
        """Of tensors by number, until their memory is allocated again."""
        self._own = set[int]()
        """Those that this rank has not freed."""

    def allocate(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor | None:
        """Returns a tensor without values, or None if it is empty or there is too little memory; the same on all ranks.

        Waits until the other ranks have freed what was there. Ranks may write to different parts of it, and must not
        write again to what they have sent.
        """
        size = prod(shape) * dtype.itemsize
        place = self._fitting(size)
        if place is None:
            return None
        before = {number for number, other in self._places.items() if _overlap(place, other)}
        self._wait([(peer, _Freed(peer, before)) for peer in self._peers.values()])
        for number in before:
            del self._places[number]
            for peer in self._peers.values():
                peer.frees.announced.remove(number)
        number, self._count = self._count, self._count + 1
        self._places[number] = place
        self._own.add(number)
        memory = self._memory[place.start : place.stop]
        weakref.finalize(memory, self._free, number).atexit = False  # when the tensor and its views are freed
        return torch.from_numpy(memory).view(dtype).view(*shape)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Returns the offset of a tensor in the heap, in bytes; None if it is elsewhere."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset < self._memory.size else None

    def _free(self, number: int) -> None:
        self._own.discard(number)
        for peer in self._peers.values():
            peer.announce_free(number)

    def _fitting(self, size: int) -> range | None:
        """Returns the first place of so many bytes where this rank has no tensor."""
        start = 0
        for place in sorted((self._places[number] for number in tuple(self._own)), key=attrgetter("start")):
            if start + size <= place.start:
                break
            start = max(start, -(-place.stop // _ALIGNMENT) * _ALIGNMENT)
        return range(start, start + size) if size and start + size <= self._memory.size else None


def _overlap(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop
