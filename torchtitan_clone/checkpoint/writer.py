"""Writes a file and computes its digest; as a script without torch, which starts fast, on request.

A line of its stdin {"path": FILE, "bytes": N}: write the first N bytes of the shared memory to FILE. Lines of its
stdout: empty ones while it makes progress; then {"bytes": N, "digest": HEX} or {"error": WHY, "number": ERRNO}.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

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

PIECE = 1 << 24  # bytes that are read or written at once
BLOCK = 1 << 12  # direct I/O requires lengths that are multiples of this
SYNC_EVERY = 1 << 30  # bytes after which written data is flushed to disk, so that the flush at the end is short
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and digest of a file."""

    bytes: int
    digest: str


def write_file(
    path: Path, pieces: Iterable[Bytes], *, direct: bool = False, alive: Callable[[], object] = lambda: None
) -> FileRecord:
    """Writes a new file and flushes it to disk; calls `alive` after each piece. Raises OSError with the path.

    `direct` bypasses the page cache if the file system can and pieces start at a memory page: a tenth of the CPU time.
    """
    digest = DIGESTS[DIGEST]()
    size = 0
    unsynced = 0
    try:
        with path.open("wb", buffering=0) as file:
            if direct:
                _set_direct(file, True)
            for piece in pieces:
                _write(file, memoryview(piece))
                digest.update(piece)
                size += len(piece)
                unsynced += len(piece)
                if unsynced >= SYNC_EVERY:
                    os.fdatasync(file.fileno())
                    unsynced = 0
                alive()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return FileRecord(bytes=size, digest=digest.hexdigest())


def _write(file: FileIO, piece: memoryview) -> None:
    """Writes all of a piece; bytes that direct I/O cannot write, such as the last of a file, use the page cache."""
    while piece:
        blocks = len(piece) - len(piece) % BLOCK
        try:
            piece = piece[file.write(piece[: blocks or len(piece)]) :]
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


def digest_of(file: FileIO, *, name: str) -> str:
    """Returns the digest of an open file by the algorithm of this name."""
    digest = DIGESTS[name]()
    buffer = memoryview(bytearray(PIECE))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def pieces_of(view: memoryview) -> Iterator[memoryview]:
    """Returns slices of at most PIECE bytes."""
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))


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
        pieces = pieces_of(memory[: request["bytes"]])
        try:
            answer = asdict(write_file(Path(request["path"]), pieces, direct=True, alive=lambda: os.write(1, b"\n")))
        except OSError as error:
            answer = {"error": error.strerror or str(error), "number": error.errno}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), parent=int(sys.argv[2]), ignored_signals=[int(number) for number in sys.argv[3:]])
