"""Writes a file and computes its digest, here or in a process of its own that starts fast: a script without torch.

WriterProcess                                     main(), with the shared memory mapped
    stdin   {"path": FILE, "bytes": N}       ->   writes the first N bytes to FILE
    stdout  empty lines                      <-   while it makes progress
    stdout  {"bytes": N, "digest": HEX}      <-   or {"error": WHY, "number": ERRNO}
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NoReturn, Protocol

try:
    import xxhash
except ImportError:
    xxhash = None


Bytes = bytes | memoryview


class Digest(Protocol):
    """A hash function in progress."""

    def update(self, data: Bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


ALGORITHMS = ("blake2b", "xxh3_128")
"""Names of digests that a manifest may contain; the last one needs the package xxhash."""
DIGESTS: dict[str, Callable[[], Digest]] = {"blake2b": lambda: hashlib.blake2b(digest_size=16)}
"""Constructors of digests by their name in a manifest; new files use the last one."""
if xxhash is not None:
    DIGESTS["xxh3_128"] = xxhash.xxh3_128
DIGEST = list(DIGESTS)[-1]

CHUNK = 1 << 24  # bytes that are read or written at once
BLOCK = 1 << 12  # direct I/O requires lengths that are multiples of this
SYNC_EVERY = 1 << 30  # bytes after which written data is flushed to disk, so that the flush at the end is short
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and digest of a file."""

    bytes: int
    digest: str


def write_file(
    path: Path, chunks: Iterable[Bytes], *, direct: bool = False, alive: Callable[[], object] = lambda: None
) -> FileRecord:
    """Writes a new file and flushes it to disk; calls `alive` after each chunk. Raises OSError with the path.

    `direct` bypasses the page cache if the file system can and chunks start at a memory page: a tenth of the CPU time.
    """
    digest = DIGESTS[DIGEST]()
    size = 0
    unsynced = 0
    try:
        with path.open("wb", buffering=0) as file:
            if direct:
                _set_direct(file, True)
            for chunk in chunks:
                _write(file, memoryview(chunk))
                digest.update(chunk)
                size += len(chunk)
                unsynced += len(chunk)
                if unsynced >= SYNC_EVERY:
                    os.fdatasync(file.fileno())
                    unsynced = 0
                alive()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return FileRecord(bytes=size, digest=digest.hexdigest())


def _write(file: FileIO, chunk: memoryview) -> None:
    """Writes all of a chunk; bytes that direct I/O cannot write, such as the last of a file, use the page cache."""
    # While direct I/O is on, only multiples of BLOCK are written; EINVAL for the rest, or for unaligned memory, turns
    # it off for the remaining file. A write may also be short, as at a limit of the file size: hence the loop.
    while chunk:
        blocks = len(chunk) - len(chunk) % BLOCK
        try:
            chunk = chunk[file.write(chunk[: blocks or len(chunk)]) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(file, False):
                raise


def _set_direct(file: FileIO, wanted: bool) -> bool:
    """Switches direct I/O on or off if the file system supports it; returns whether that is a change."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, changed)
    return changed != flags


def digest_of(file: FileIO | BufferedReader, *, name: str) -> str:
    """Returns the digest of an open file by the algorithm of this name."""
    digest = DIGESTS[name]()
    buffer = memoryview(bytearray(CHUNK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def chunks_of(view: memoryview) -> Iterator[memoryview]:
    """Returns slices of at most CHUNK bytes."""
    return (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))


class WriterLostError(Exception):
    """The writer process has ended or cannot be started; the message says how."""


class WriterProcess:
    """A process that copies shared memory into files. `write` ends it when it does not respond in time."""

    def __init__(self, descriptor: int, *, timeout_seconds: float, ignored_signals: Sequence[int] = ()):
        self._descriptor = descriptor
        self._ignored_signals = ignored_signals
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the process unless it runs; it ends with the calling thread. WriterLostError if that fails."""
        if self.pid is None:
            arguments = [self._descriptor, os.getpid(), *(int(number) for number in self._ignored_signals)]
            # -P: modules in the folder of the script must not hide those of the standard library.
            command = [sys.executable, "-P", __file__, *map(str, arguments)]
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


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, even while it waits for the disk."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int, *, parent: int, ignored_signals: Sequence[int]) -> None:
    """Serves requests from stdin. Ignores signals sent to all processes: the trainer may need its writer to stop."""
    for number in ignored_signals:
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    # Maps all pages now, to avoid page faults in the first save.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags, prot=mmap.PROT_READ))
    for line in sys.stdin:
        request = json.loads(line)
        chunks = chunks_of(memory[: request["bytes"]])
        try:
            answer = asdict(write_file(Path(request["path"]), chunks, direct=True, alive=lambda: os.write(1, b"\n")))
        except OSError as error:
            answer = {"error": error.strerror or str(error), "number": error.errno}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), parent=int(sys.argv[2]), ignored_signals=[int(number) for number in sys.argv[3:]])
