"""Shared memory into which a rank copies its shards, laid out as the file that they will become."""

import errno
import logging
import mmap
import os
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_clone.checkpoint.layout import Plan

logger = logging.getLogger("torchtitan_clone")

_MADV_POPULATE_WRITE = 23
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


class StagingBuffer:
    """Shared memory for one file, reused by every save; pinned if CUDA is available. OSError if there is too little."""

    def __init__(self, plan: Plan):
        self._plan = plan
        # Unlike a file in /dev/shm, it disappears with its process and does not count against the size of that mount.
        self.descriptor = os.memfd_create("torchtitan_clone_checkpoint")
        try:
            self._map = _reserve(self.descriptor, size=plan.bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.Event | None = None

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)

    def prepare(self) -> None:
        """Writes the header and touches every page: page faults would make the first save ten times slower."""
        self._bytes[:: mmap.PAGESIZE] = 0
        self._bytes[: len(self._plan.header)] = np.frombuffer(self._plan.header, dtype=np.uint8)
        if self._stream is not None:
            runtime: Any = torch.cuda.cudart()  # Any: torch has no type for it
            with torch.cuda.stream(self._stream):
                error = runtime.cudaHostRegister(self._bytes.ctypes.data, self._plan.bytes, _PORTABLE)
            if int(error) != 0:
                logger.warning("staging memory cannot be pinned (CUDA error %s): copies will be slower", int(error))

    def follow_current_stream(self) -> None:
        """On CUDA, makes later copies of `stage` wait for the work queued on the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def stage(self, state: dict[str, Tensor]) -> None:
        """Copies the shards: CPU tensors synchronously, CUDA tensors asynchronously on a separate stream."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for placement, source in self._plan.shards(state):
                target = self._bytes[placement.begin : placement.end]
                if source.is_cuda:
                    torch.from_numpy(target).copy_(source, non_blocking=True)
                else:
                    np.copyto(target, source.numpy())  # without the interpreter lock, in one thread
        if self._stream is not None:
            self._copied = self._stream.record_event()

    def hold_current_stream(self) -> None:
        """On CUDA, makes work that is queued on the current stream from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait_for_copies(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        if self._stream is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._bytes.ctypes.data)
        del self._bytes
        self._map.close()
        os.close(self.descriptor)


def _reserve(descriptor: int, *, size: int) -> mmap.mmap:
    """Allocates all pages of the shared memory; huge pages, if available, halve the time of a copy."""
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: Linux before 5.14
            raise
        os.posix_fallocate(descriptor, 0, size)
    return memory
