"""Writes the file of one rank, in the configured mode or in a simpler one if that fails."""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from torchtitan_clone.checkpoint import writer
from torchtitan_clone.checkpoint.layout import Plan
from torchtitan_clone.checkpoint.staging import StagingBuffer
from torchtitan_clone.checkpoint.tensor_file import file_content
from torchtitan_clone.checkpoint.writer import FileRecord, pieces_of, write_file
from torchtitan_clone.config.signals import STOP_SIGNALS
from torchtitan_clone.files import format_bytes

logger = logging.getLogger("torchtitan_clone")

DIRECT = "disabled"
THREAD = "async"
PROCESS = "async_with_pinned_mem"
_ATTEMPTS = 2


class WriterLostError(Exception):
    """The writer process has ended or cannot be started; the message says how."""


class RankFile:
    """Writes this rank's file, once per save: from the tensors, or from a staging `buffer` by a thread or a process."""

    def __init__(self, plan: Plan, *, mode: str, timeout_seconds: float):
        self.plan = plan
        self.buffer = None if mode == DIRECT else _build_buffer(plan)
        self._writer: WriterProcess | None = None
        if self.buffer is not None and mode == PROCESS:
            self._writer = WriterProcess(self.buffer.descriptor, timeout_seconds=timeout_seconds)

    @property
    def writer_pid(self) -> int | None:
        return self._writer.pid if self._writer else None

    def prepare(self) -> None:
        """Does the setup that the first save would wait for; may run in another thread."""
        if self.buffer is not None:
            self.buffer.prepare()
        if self._writer is not None:
            with contextlib.suppress(WriterLostError):  # the first save tries again and warns
                self._writer.start()

    def write(self, path: Path, *, state: dict[str, Tensor]) -> FileRecord:
        """Writes the staged copy, or else the tensors of `state`. Raises OSError if the disk fails."""
        if self.buffer is None:
            shards = (shard for _, shard in self.plan.shards(state))
            return write_file(path, file_content(self.plan.header, shards))
        if self._writer is not None and (record := self._write_by_process(path, self._writer)):
            return record
        return write_file(path, pieces_of(self.buffer.view), direct=True)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self.buffer is not None:
            self.buffer.close()

    def _write_by_process(self, path: Path, process: "WriterProcess") -> FileRecord | None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return process.write(path, size=self.plan.bytes)
            except WriterLostError as lost:
                logger.warning("checkpoint: %s; attempt %d of %d", lost, attempt, _ATTEMPTS)
        logger.warning('checkpoint: falling back to a writer thread, as with checkpoint.async_mode = "%s"', THREAD)
        self._writer = None
        return None


def _build_buffer(plan: Plan) -> StagingBuffer | None:
    try:
        return StagingBuffer(plan)
    except OSError as error:
        what = f"cannot allocate {format_bytes(plan.bytes)} of memory for staging ({error.strerror})"
        remedy = f'training waits for each save, as with checkpoint.async_mode = "{DIRECT}"'
        logger.warning("checkpoint: %s; %s", what, remedy)
        return None


class WriterProcess:
    """A process that copies shared memory into files. `write` ends it when it does not respond in time."""

    def __init__(self, descriptor: int, *, timeout_seconds: float):
        self._descriptor = descriptor
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the process unless it runs; it ends with the calling thread. WriterLostError if that fails."""
        if self.pid is None:
            arguments = [self._descriptor, os.getpid(), *(int(number) for number in STOP_SIGNALS)]
            # -P: modules in the folder of the script must not hide those of the standard library.
            command = [sys.executable, "-P", writer.__file__, *map(str, arguments)]
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[self._descriptor])
            except OSError as error:
                raise WriterLostError(f"the writer process cannot be started: {error}") from None
            self._unread = b""

    def write(self, path: Path, *, size: int) -> FileRecord:
        """Writes the first `size` bytes to a file. Raises OSError if the disk fails, WriterLostError if it ends."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"path": str(path), "bytes": size}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._end(self._process, "died")
        while not (line := self._next_line(self._process)):
            pass
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["number"], answer["error"], str(path))
        return FileRecord(**answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _next_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + self._timeout_seconds
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
                self._end(process, f"made no progress for {self._timeout_seconds:g} s")
            if not (received := os.read(process.stdout.fileno(), 1 << 16)):
                self._end(process, "died")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _end(self, process: subprocess.Popen[bytes], what: str) -> NoReturn:
        """Kills the process and raises WriterLostError; OSError if it hangs in the disk and cannot be killed."""
        process.kill()
        try:
            code = process.wait(timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            hang = f"the disk does not respond, and writer process {process.pid} cannot be killed; check the storage"
            raise OSError(0, hang) from None
        how = f" (exit code {code})" if what == "died" else ""
        raise WriterLostError(f"the writer process {process.pid} {what}{how}")
