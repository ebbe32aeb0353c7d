"""How one rank's file of a save comes to disk, in the mode that is asked for or the simpler one that still works."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtitan_clone.checkpoint.layout import Layout
from torchtitan_clone.checkpoint.staging import StagingBuffer
from torchtitan_clone.checkpoint.writer import FileRecord, pieces_of, write_file
from torchtitan_clone.checkpoint.writer_process import WriterLostError, WriterProcess

logger = logging.getLogger("torchtitan_clone")

DIRECT, THREAD, PROCESS = "disabled", "async", "async_with_pinned_mem"
_ATTEMPTS = 2


class RankFile:
    """Writes this rank's file, again and again.

    With a staging arena the state is copied first and written later, by a thread of this process or by a process of its
    own; without one it is written from the tensors themselves.
    """

    def __init__(self, layout: Layout, *, mode: str, timeout_seconds: float):
        self._layout = layout
        self._arena = None if mode == DIRECT else _build_arena(layout)
        self._writer: WriterProcess | None = None
        if self._arena is not None and mode == PROCESS:
            self._writer = WriterProcess(self._arena.descriptor, timeout_seconds=timeout_seconds)

    @property
    def name(self) -> str:
        """The file's name in the checkpoint."""
        return self._layout.file

    @property
    def is_staged(self) -> bool:
        """Whether the state is copied first."""
        return self._arena is not None

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer, where there is one."""
        return self._writer.pid if self._writer else None

    def prepare(self) -> None:
        """What the first save would otherwise have to wait for; may run beside the training."""
        if self._arena is not None:
            self._arena.prepare()
        if self._writer is not None:
            self._writer.start()

    def follow_current_stream(self) -> None:
        """On CUDA, copies wait for all that the training has asked the device for up to now."""
        if self._arena is not None:
            self._arena.follow_current_stream()

    def stage(self, state: dict[str, Tensor]) -> None:
        """Copies this rank's part; on CUDA the copies may still be under way."""
        assert self._arena is not None
        self._arena.stage(state)

    def wait_for_copies(self) -> None:
        """Until no copy is under way any more."""
        if self._arena is not None:
            self._arena.wait()

    def hold_current_stream(self) -> None:
        """On CUDA, what the training asks for from now on waits for the copies."""
        if self._arena is not None:
            self._arena.hold_current_stream()

    def write(self, path: Path, *, state: dict[str, Tensor]) -> FileRecord:
        """Writes what was staged, or else the state. OSError for what the disk had to say."""
        if self._arena is None:
            return write_file(path, self._pieces(state))
        if self._writer is not None and (record := self._write_by_process(path, self._writer)):
            return record
        return write_file(path, pieces_of(self._arena.view), direct=True)

    def close(self) -> None:
        """Ends the writer process and frees the memory."""
        if self._writer is not None:
            self._writer.close()
        if self._arena is not None:
            self._arena.close()

    def _write_by_process(self, path: Path, writer: WriterProcess) -> FileRecord | None:
        """The process has two attempts; then this mode is over."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return writer.write(path, size=self._layout.bytes)
            except WriterLostError as lost:
                logger.warning("checkpoint: %s; attempt %d of %d", lost, attempt, _ATTEMPTS)
        logger.warning('checkpoint: from now on a thread writes, as with checkpoint.async_mode = "%s"', THREAD)
        self._writer = None
        return None

    def _pieces(self, state: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
        yield self._layout.header
        for _, source in self._layout.sources(state):
            numbers: Any = source.cpu().numpy()
            yield from pieces_of(memoryview(numbers))


def _build_arena(layout: Layout) -> StagingBuffer | None:
    try:
        return StagingBuffer(layout)
    except OSError as error:
        gib = layout.bytes / 2**30
        logger.warning(
            'checkpoint: no %.2f GiB of memory for staging (%s); the training waits for each save, as with '
            'checkpoint.async_mode = "%s"', gib, error.strerror, DIRECT,
        )  # fmt: skip
        return None
