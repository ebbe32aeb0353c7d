"""Writing a file so that it is on disk and its digest known; run as a script, a process that does so on request.

The process is handed shared memory as an open file and copies it into files. It needs nothing but the standard library
(and xxhash, where there is one), so that it starts in a few hundredths of a second and holds no copy of torch.

    a line of its stdin    {"path": FILE, "bytes": N}: write the first N bytes of the shared memory to FILE
    lines of its stdout    empty ones while it gets on; then {"bytes": N, "digest": HEX} or {"error": WHY}

It dies with the thread that started it, also where it is stopped or waits for the disk.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

try:
    import xxhash
except ImportError:
    xxhash = None

DIGESTS: dict[str, Callable[[], Any]] = {"blake2b": lambda: hashlib.blake2b(digest_size=16)}
"""Makers of digests, by the name that stands in a manifest; the last one is used for new files."""
if xxhash is not None:
    DIGESTS["xxh3_128"] = xxhash.xxh3_128
DIGEST = list(DIGESTS)[-1]

PIECE = 1 << 24
BLOCK = 1 << 12
"""What a disk reads and writes at once divides this."""
SYNC_EVERY = 1 << 30
"""Bytes after which what was written is forced to disk, so that the last forcing is never a long one."""
_PR_SET_PDEATHSIG = 1
FAREWELL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a terminal or a cluster sends to all processes of a run: the trainer answers it, and needs its writer for it."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What is known of a file on disk."""

    bytes: int
    digest: str


def write_file(
    path: Path, pieces: Iterable[Any], *, direct: bool = False, alive: Callable[[], object] = lambda: None
) -> FileRecord:
    """Writes bytes-like pieces to a new file and forces it to disk; `alive` is called after each. OSError names it.

    The digest is that of what was to be written, not of what can be read back. With `direct` the disk fetches pieces
    that begin at a page of memory itself, where it can: that takes a tenth of the CPU time, and no memory.
    """
    digest, size, unsynced = DIGESTS[DIGEST](), 0, 0
    try:
        with path.open("wb", buffering=0) as file:
            if direct:
                _set_direct(file, True)
            for piece in pieces:
                _write(file, memoryview(piece))
                digest.update(piece)
                size, unsynced = size + len(piece), unsynced + len(piece)
                if unsynced >= SYNC_EVERY:
                    os.fdatasync(file.fileno())
                    unsynced = 0
                alive()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return FileRecord(bytes=size, digest=digest.hexdigest())


def _write(file: FileIO, piece: memoryview) -> None:
    """All of it; what cannot be written directly, as the last bytes of a file, goes through the page cache."""
    while piece:
        blocks = len(piece) - len(piece) % BLOCK
        try:
            piece = piece[file.write(piece[: blocks or len(piece)]) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(file, False):
                raise


def _set_direct(file: FileIO, wanted: bool) -> bool:
    """Whether that changed something; a file system that cannot write directly stays as it is."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, changed)
    return changed != flags


def digest_of_file(path: Path, *, name: str) -> str:
    """The digest of that name, of what stands in the file."""
    digest = DIGESTS[name]()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(PIECE))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def pieces_of(view: memoryview) -> Iterator[memoryview]:
    """Parts of at most PIECE bytes."""
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))


def _die_with(parent: int) -> None:
    """Tells the kernel to kill this process when its parent ends: a closed pipe says so only to who reads it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int, *, parent: int) -> None:
    """Serves requests. Progress and answers go out line by line."""
    for number in FAREWELL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    # All pages at once: each would be a page fault in the first save.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags=flags, prot=mmap.PROT_READ))
    for line in sys.stdin:
        request = json.loads(line)
        path, pieces = Path(request["path"]), pieces_of(memory[: request["bytes"]])
        try:
            answer = asdict(write_file(path, pieces, direct=True, alive=lambda: os.write(1, b"\n")))
        except OSError as error:
            answer = {"error": error.strerror or str(error), "number": error.errno}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), parent=int(sys.argv[2]))
