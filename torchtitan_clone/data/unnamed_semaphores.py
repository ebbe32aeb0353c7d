"""Queues and events for spawned processes without names in /dev/shm, which stay there if every process is killed.

multiprocessing passes semaphores to spawned processes by name and has a process that unlinks the names; where that one
is killed too, they remain until the machine restarts. File descriptors end with their last process.
"""

import os
import select
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.reduction import DupFd
from typing import Protocol


class _Inherited(Protocol):
    """A descriptor on its way to a spawned process."""

    def detach(self) -> int: ...


class _Counter:
    """A file descriptor that counts, in the kernel; pickled only while a process is spawned, which inherits it."""

    def __init__(self, value: int, *, descriptor: int | None = None) -> None:
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._descriptor = os.eventfd(value, flags) if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _rebuild, (type(self), DupFd(self._descriptor))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def _is_positive(self, *, timeout: float | None) -> bool:
        """Waits up to `timeout` seconds, None: for ever, until the count is above 0."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))


class Semaphore(_Counter):
    """What multiprocessing.Queue needs of a lock or a semaphore."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Takes one, as multiprocessing.Lock does; False if there was none within `timeout` seconds."""
        while self._is_positive(timeout=timeout if block else 0):
            try:
                os.eventfd_read(self._descriptor)
            except BlockingIOError:
                continue  # another process was faster
            return True
        return False

    def release(self) -> None:
        """Returns one."""
        os.eventfd_write(self._descriptor, 1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event(_Counter):
    """What a data loader needs of multiprocessing.Event."""

    def set(self) -> None:
        """Sets the event for all processes."""
        os.eventfd_write(self._descriptor, 1)

    def is_set(self) -> bool:
        """Returns whether a process has set the event."""
        return self._is_positive(timeout=0)


class UnnamedContext(SpawnContext):
    """multiprocessing's spawn context with queues and events that have no names."""

    def Lock(self) -> Semaphore:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns a lock that any process may release."""
        return Semaphore(1)

    def BoundedSemaphore(self, value: int = 1) -> Semaphore:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns a semaphore, whose upper bound is not checked."""
        return Semaphore(value)

    def Event(self) -> Event:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns an event that is not set."""
        return Event(0)


def _rebuild(kind: type[_Counter], inherited: _Inherited) -> _Counter:
    return kind(0, descriptor=inherited.detach())
