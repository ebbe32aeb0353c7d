"""Starts and supervises the writer process, and ends it when it makes no progress."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from torchtitan_clone.checkpoint import writer
from torchtitan_clone.checkpoint.writer import FileRecord
from torchtitan_clone.config.signals import STOP_SIGNALS


class WriterLostError(Exception):
    """The writer process has ended; the message says how."""


class WriterProcess:
    """A process that copies shared memory into files. `write` ends it when it does not respond in time."""

    def __init__(self, descriptor: int, *, timeout_seconds: float):
        self._descriptor = descriptor
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """Its process id, or None if it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the process unless it runs; it ends with the calling thread. OSError if it cannot be started."""
        if self.pid is None:
            arguments = [self._descriptor, os.getpid(), *(int(number) for number in STOP_SIGNALS)]
            self._process = subprocess.Popen(
                # -P: modules in the folder of the script must not hide those of the standard library.
                [sys.executable, "-P", writer.__file__, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._descriptor],
            )
            self._unread = b""

    def write(self, path: Path, *, size: int) -> FileRecord:
        """Writes the first `size` bytes to a file. Raises OSError if the disk fails, WriterLostError if it ends."""
        self.start()
        request = json.dumps({"path": str(path), "bytes": size}).encode()
        stdin = self._running().stdin
        assert stdin is not None
        try:
            stdin.write(request + b"\n")
            stdin.flush()
        except OSError:
            self._end("died")
        while not (line := self._next_line()):
            pass
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["number"], answer["error"], str(path))
        return FileRecord(**answer)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _next_line(self) -> bytes:
        """Returns the next line of its output without the newline; waits at most the timeout."""
        stdout = self._running().stdout
        assert stdout is not None
        deadline = time.monotonic() + self._timeout_seconds
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
                self._end(f"made no progress for {self._timeout_seconds:g} s")
            received = os.read(stdout.fileno(), 1 << 16)
            if not received:
                self._end("died")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _end(self, what: str) -> NoReturn:
        """Kills the process and raises WriterLostError; OSError if it hangs in the disk and cannot be killed."""
        process = self._running()
        process.kill()
        try:
            code = process.wait(timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            raise OSError(
                0, f"the disk does not respond, and writer process {process.pid} cannot be killed; check the storage"
            ) from None
        how = f" (exit code {code})" if what == "died" else ""
        raise WriterLostError(f"the writer process {process.pid} {what}{how}")

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process
