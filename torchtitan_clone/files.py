"""File operations whose effect survives a crash of the machine, and sizes as text."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder (names that were added, renamed or removed) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name, flushes it and renames it: readers see the old or the new content."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a killed process; opening a pipe would block, a link write elsewhere
    with partial.open("xb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def format_bytes(size: int) -> str:
    """Formats a size with two decimals in the largest of KiB, MiB and GiB that it reaches, or in bytes below those."""
    for unit, bytes_each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_each:
            return f"{size / bytes_each:.2f} {unit}"
    return f"{size} bytes"
