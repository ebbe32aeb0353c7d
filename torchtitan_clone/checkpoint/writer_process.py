"""The writer process as its trainer sees it: asked to write, watched, and ended when it does not get on."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torchtitan_clone.checkpoint import writer
from torchtitan_clone.checkpoint.writer import FileRecord


class WriterLostError(Exception):
    """The writer process is gone; the message says how it went."""


class WriterProcess:
    """A process that copies shared memory into files. Every method but `start` ends it where it does not answer."""

    def __init__(self, descriptor: int, *, timeout_seconds: float):
        self._descriptor = descriptor
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts it, unless it runs; it dies with the thread that calls this. OSError where there can be no process."""
        if self.pid is None:
            self._process = subprocess.Popen(
                # -P: the folder of the script must not hide modules of the standard library.
                [sys.executable, "-P", writer.__file__, str(self._descriptor), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._descriptor],
            )
            self._unread = b""

    def write(self, path: Path, *, size: int) -> FileRecord:
        """Has the first `size` bytes written to a file. OSError for what the disk said; WriterLostError."""
        self.start()
        process = self._running()
        try:
            process.stdin.write(json.dumps({"path": str(path), "bytes": size}).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._end("died")
        while not (line := self._next_line()):
            pass
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["number"], answer["error"], str(path))
        return FileRecord(**answer)

    def close(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _next_line(self) -> bytes:
        """The next line of its output, without its end; waits no longer than the timeout."""
        output = self._running().stdout.fileno()
        deadline = time.monotonic() + self._timeout_seconds
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
                self._end(f"made no progress for {self._timeout_seconds:g} s")
            received = os.read(output, 1 << 16)
            if not received:
                self._end("died")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _end(self, what: str) -> None:
        """Kills it by its id and raises WriterLostError; one that cannot be killed hangs in the disk: OSError."""
        process = self._running()
        process.kill()
        try:
            code = process.wait(timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            raise OSError(0, "the disk does not answer, and the process that waits for it cannot be killed") from None
        how = f" (exit code {code})" if what == "died" else ""
        raise WriterLostError(f"the writer process {process.pid} {what}{how}")

    def _running(self) -> Any:
        assert self._process is not None
        return self._process
