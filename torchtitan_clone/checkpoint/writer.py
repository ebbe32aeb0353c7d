"""Writing a file so that it is on disk and its digest known; run as a script, a process that does so on request.

The process is handed shared memory as an open file and copies it into files. It needs nothing but the standard library
(and xxhash, where there is one), so that it starts in a few hundredths of a second and holds no copy of torch.

    a line of its stdin    {"path": FILE, "bytes": N}: write the first N bytes of the shared memory to FILE
    lines of its stdout    empty ones while it gets on; then {"bytes": N, "digest": HEX} or {"error": WHY}

It ends when its parent has: at the latest a second later, or after the piece it is writing.
"""

import hashlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
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
SYNC_EVERY = 1 << 30
"""Bytes after which what was written is forced to disk, so that the last forcing is never a long one."""
FAREWELL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a terminal or a cluster sends to all processes of a run: the trainer answers it, and needs its writer for it."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What is known of a file on disk."""

    bytes: int
    digest: str


def write_file(path: Path, pieces: Iterable[Any], *, alive: Callable[[], None] = lambda: None) -> FileRecord:
    """Writes bytes-like pieces to a new file and forces it to disk; `alive` is called after each. OSError names it.

    The digest is that of what was to be written, not of what can be read back.
    """
    digest, size, unsynced = DIGESTS[DIGEST](), 0, 0
    try:
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size, unsynced = size + len(piece), unsynced + len(piece)
                if unsynced >= SYNC_EVERY:
                    file.flush()
                    os.fdatasync(file.fileno())
                    unsynced = 0
                alive()
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return FileRecord(bytes=size, digest=digest.hexdigest())


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


def _pieces_of_memory(descriptor: int, size: int) -> Iterator[memoryview]:
    """Read piece by piece: mapping the memory once more would cost a page fault for every page."""
    buffer = memoryview(bytearray(PIECE))
    for start in range(0, size, PIECE):
        piece = buffer[: min(PIECE, size - start)]
        os.preadv(descriptor, [piece], start)
        yield piece


def _requests(parent: int) -> Iterator[dict[str, Any]]:
    """What is asked for, until the parent is gone. Its pipe alone would not tell: a fork of it may hold the end too."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(1000):
            line = sys.stdin.readline()
            if not line:
                return
            yield json.loads(line)


def main(descriptor: int, *, parent: int) -> None:
    """Serves requests. Progress and answers go out line by line; without the parent the process ends at once."""
    for number in FAREWELL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def alive() -> None:
        if os.getppid() != parent:
            os._exit(1)
        os.write(1, b"\n")

    for request in _requests(parent):
        try:
            record = write_file(Path(request["path"]), _pieces_of_memory(descriptor, request["bytes"]), alive=alive)
            answer = asdict(record)
        except OSError as error:
            answer = {"error": error.strerror or str(error), "number": error.errno}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), parent=int(sys.argv[2]))
