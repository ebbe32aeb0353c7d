"""Writes the file of one rank, in the configured mode or in a simpler one if that fails."""

import logging
from pathlib import Path

from torch import Tensor

from torchtitan_clone.checkpoint.layout import Layout
from torchtitan_clone.checkpoint.staging import StagingBuffer
from torchtitan_clone.checkpoint.tensor_file import file_content
from torchtitan_clone.checkpoint.writer import FileRecord, pieces_of, write_file
from torchtitan_clone.checkpoint.writer_process import WriterLostError, WriterProcess

logger = logging.getLogger("torchtitan_clone")

DIRECT = "disabled"
THREAD = "async"
PROCESS = "async_with_pinned_mem"
_ATTEMPTS = 2


class RankFile:
    """Writes this rank's file, once per save.

    With a staging `buffer` the shards are copied first and written later, by a thread of this process or by a writer
    process; without one they are written from the tensors directly. `name` is that in the checkpoint folder.
    """

    def __init__(self, layout: Layout, *, mode: str, timeout_seconds: float):
        self.name = layout.file
        self._layout = layout
        self.buffer = None if mode == DIRECT else _build_buffer(layout)
        self._writer: WriterProcess | None = None
        if self.buffer is not None and mode == PROCESS:
            self._writer = WriterProcess(self.buffer.descriptor, timeout_seconds=timeout_seconds)

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer process, if there is one."""
        return self._writer.pid if self._writer else None

    def prepare(self) -> None:
        """Does the setup that the first save would wait for; may run in another thread."""
        if self.buffer is not None:
            self.buffer.prepare()
        if self._writer is not None:
            self._writer.start()

    def write(self, path: Path, *, state: dict[str, Tensor]) -> FileRecord:
        """Writes the staged copy, or else the tensors of `state`. Raises OSError if the disk fails."""
        if self.buffer is None:
            shards = (shard for _, shard in self._layout.shards(state))
            return write_file(path, file_content(self._layout.header, shards))
        if self._writer is not None and (record := self._write_by_process(path, self._writer)):
            return record
        return write_file(path, pieces_of(self.buffer.view), direct=True)

    def close(self) -> None:
        """Ends the writer process and frees the memory."""
        if self._writer is not None:
            self._writer.close()
        if self.buffer is not None:
            self.buffer.close()

    def _write_by_process(self, path: Path, writer: WriterProcess) -> FileRecord | None:
        """Writes with up to two writer processes; if both fail, returns None and uses no further process."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return writer.write(path, size=self._layout.bytes)
            except WriterLostError as lost:
                logger.warning("checkpoint: %s; attempt %d of %d", lost, attempt, _ATTEMPTS)
        logger.warning('checkpoint: falling back to a writer thread, as with checkpoint.async_mode = "%s"', THREAD)
        self._writer = None
        return None


def _build_buffer(layout: Layout) -> StagingBuffer | None:
    try:
        return StagingBuffer(layout)
    except OSError as error:
        logger.warning(
            "checkpoint: cannot allocate %.2f GiB of memory for staging (%s); training waits for each save, as with "
            'checkpoint.async_mode = "%s"', layout.bytes / 2**30, error.strerror, DIRECT,
        )  # fmt: skip
        return None
