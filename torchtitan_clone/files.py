"""Durable writes to a local or shared file system."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries (created, renamed and removed names) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file so that readers, and a machine that loses power, see the old or the new content."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
