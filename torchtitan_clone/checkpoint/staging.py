"""The shared memory into which a rank's part of the state is copied, in the shape of the file that it will become."""

import errno
import logging
import mmap
import os
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_clone.checkpoint.layout import Layout

logger = logging.getLogger("torchtitan_clone")

_PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
_PORTABLE = 1
"""Pinned for every CUDA context."""


class StagingBuffer:
    """Shared memory for one file, kept from save to save; on CUDA it is pinned.

    Making one reserves the memory (OSError where there is too little); `prepare` does what takes longer, and may run
    beside the training.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        # Unlike a file in /dev/shm it has no name to be left behind by a kill, and no limit of a container's mount.
        self.descriptor = os.memfd_create("torchtitan_clone_checkpoint")
        try:
            self._map = _reserve(self.descriptor, size=layout.bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: Any = None

    @property
    def view(self) -> memoryview:
        """The content of the file."""
        return memoryview(self._map)

    def prepare(self) -> None:
        """Writes the header and takes the page faults, which would make the first save ten times slower."""
        self._bytes[::_PAGE] = 0
        self._bytes[: len(self._layout.header)] = np.frombuffer(self._layout.header, dtype=np.uint8)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                runtime: Any = torch.cuda.cudart()
                error = runtime.cudaHostRegister(self._bytes.ctypes.data, self._layout.bytes, _PORTABLE)
            if int(error) != 0:
                logger.warning("staging memory cannot be pinned (CUDA error %s): copies will be slower", int(error))

    def follow_current_stream(self) -> None:
        """Copies that `stage` starts wait for what the device was asked before this call."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def stage(self, state: dict[str, Tensor]) -> None:
        """Copies the state: from a CPU at once, from a CUDA device on a stream of its own.

        numpy copies without holding the interpreter, and on one thread: the training needs the other cores.
        """
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for place, source in self._layout.sources(state):
                target = self._bytes[place.begin : place.end]
                if source.is_cuda:
                    torch.from_numpy(target).copy_(source, non_blocking=True)
                else:
                    np.copyto(target, source.numpy())
        if self._stream is not None:
            self._copied = self._stream.record_event()

    def hold_current_stream(self) -> None:
        """What the device is asked after this call waits until the copies are done."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def close(self) -> None:
        """Gives the memory back."""
        if self._stream is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._bytes.ctypes.data)
        del self._bytes
        self._map.close()
        os.close(self.descriptor)

    def wait(self) -> None:
        """Until the copies are done."""
        if self._copied is not None:
            self._copied.synchronize()


def _reserve(descriptor: int, *, size: int) -> mmap.mmap:
    """All pages of so much shared memory; huge ones, where the kernel has them, are copied to in half the time."""
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise
        os.posix_fallocate(descriptor, 0, size)
    return memory
