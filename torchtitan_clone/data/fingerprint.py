"""Fingerprint of a source: one hash of the names, sizes and contents of its files, independent of their location."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_clone.data.sources import Source
from torchtitan_clone.files import write_atomically

_Entry = tuple[int, int, str]
"""Size in bytes, time of last modification in ns, sha256."""


def source_fingerprint(source: Source, *, listing: Path) -> str:
    """Returns the hash of a source; the file `listing` caches the hash of each file, so that only changes are read."""
    known = _read_listing(listing)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        entries = threads.map(lambda file: _entry(file, known=known.get(str(file))), source.files)
        files = dict(zip(map(str, source.files), entries, strict=True))
    if files != known:
        write_atomically(listing, json.dumps(files).encode())
    contents = [
        (file.relative_to(source.root).as_posix(), size, digest)
        for file, (size, _, digest) in zip(source.files, files.values(), strict=True)
    ]
    return digest_of([contents, source.text_key])


def digest_of(value: object) -> str:
    """Returns the sha256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _entry(file: Path, *, known: _Entry | None) -> _Entry:
    status = file.stat()
    if known is not None and known[:2] == (status.st_size, status.st_mtime_ns):
        return known
    with file.open("rb") as content:
        return status.st_size, status.st_mtime_ns, hashlib.file_digest(content, "sha256").hexdigest()


def _read_listing(listing: Path) -> dict[str, _Entry]:
    try:
        return {file: (size, time, digest) for file, (size, time, digest) in json.loads(listing.read_text()).items()}
    except (FileNotFoundError, ValueError):  # without it, all files are read again
        return {}
