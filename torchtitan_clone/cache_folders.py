"""The user's folder of caches, and folders of compiled code.

What a folder of code contains is executed. So nobody but the user and root may be able to write there, or to put
another folder in its place. Where the usual folder is not safe, or cannot be written, code is kept in a folder of
temporary files that belongs to the user.
"""

import fcntl
import grp
import logging
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from stat import S_IRWXG, S_IRWXO, S_ISLNK, S_ISVTX, S_IWGRP, S_IWOTH
from typing import BinaryIO

from torchtitan_clone.files import write_atomically

logger = logging.getLogger("torchtitan_clone")

_DIGEST_BYTES = 32
_NAME = "torchtitan_clone"
_REMEDY = "set $XDG_CACHE_HOME to a folder that only you can write to, on a file system that is not mounted noexec"
_in_use: list[BinaryIO] = []
"""Files whose locks this process holds until it ends."""


class NoCodeFolderError(OSError):
    """There is no folder from which compiled code can be executed; says why, and what to do."""


def user_cache_folder() -> Path:
    """Returns torchtitan_clone in $XDG_CACHE_HOME or ~/.cache; without a home a folder of temporary files."""
    for parent in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if Path(parent).is_absolute():  # a relative path is to be ignored (XDG Base Directory Specification)
            return Path(parent, _NAME)
    return _temporary_folder()


def code_folders(name: str, *, chosen: str = "") -> list[Path]:
    """Returns folders whose code is safe to execute, by precedence; only the last one can be written to.

    They are named `name` in the user's cache folder, or `chosen`. NoCodeFolderError if there is none.
    """
    usual = Path(chosen) if chosen else user_cache_folder() / name
    faults: list[str] = []
    safe: list[Path] = []
    for folder in (lambda: usual, lambda: _temporary_folder() / name):
        _try_folder(folder, safe=safe, faults=faults)
        if safe and os.access(safe[-1], os.W_OK):
            for fault in faults:
                _report(f"compiled code is kept in {safe[-1]}: {fault}; {_REMEDY}")
            return safe
    faults += [f"{folder} cannot be written to" for folder in safe]
    raise NoCodeFolderError(f"{'; '.join(faults)}; {_REMEDY}")


@cache
def _report(text: str) -> None:
    logger.warning("%s", text)


def _try_folder(find: Callable[[], Path], *, safe: list[Path], faults: list[str]) -> None:
    """Creates a folder, and appends its path without links to the safe ones, or what is wrong with it to `faults`."""
    try:
        folder = find()
        with suppress(OSError):  # where it is in a folder that cannot be written to
            make_folder(folder)
        folder = folder.resolve(strict=True)
        fault = find_fault(folder)
        if fault:
            faults.append(fault)
        else:
            safe.append(folder)
    except (OSError, RuntimeError) as error:
        faults.append(str(error))


def make_folder(folder: Path) -> None:
    """Creates a folder that only this user can enter, whatever modes its content gets, and those above it."""
    for path in reversed((folder, *folder.parents)):
        with suppress(FileExistsError):
            path.mkdir(0o700 if path == folder else 0o755)


def find_fault(folder: Path) -> str:
    """Returns why code in a folder, whose path has no links, is not safe to execute or cannot be; "" if it is."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is on a file system that is mounted noexec"
    for path in (folder, *folder.parents):
        if fault := _find_fault_of(path, path.lstat(), is_above=path != folder):
            return fault
    for path in _content(folder) if folder.stat().st_mode & (S_IRWXG | S_IRWXO) else ():
        with suppress(FileNotFoundError):  # another process removes and renames files of its own
            if fault := _find_fault_of(path, path.lstat(), is_above=False):
                return fault
    return ""


def _content(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def _find_fault_of(path: Path, info: os.stat_result, *, is_above: bool) -> str:
    """Returns why a folder of code, what it contains or a folder above it is not safe."""
    # In a user namespace without root all other users have one number, so that of a folder of code says nothing.
    owners = {os.geteuid(), 0, *([Path(path.anchor).stat().st_uid] if is_above else ())}
    if info.st_uid not in owners:
        return f"{path} belongs to user {info.st_uid}"
    is_shared = info.st_mode & S_IWOTH or (info.st_mode & S_IWGRP and not _is_own_group(info))
    is_sticky = info.st_mode & S_ISVTX and is_above  # as /tmp, where only owners rename
    return f"other users can write to {path}" if is_shared and not is_sticky and not S_ISLNK(info.st_mode) else ""


def _is_own_group(info: os.stat_result) -> bool:
    """Whether the group is one of the user alone, as Linux distributions create for each user."""
    if info.st_uid != os.geteuid() or info.st_gid != info.st_uid:
        return False
    with suppress(KeyError):  # a group without a name has no other members
        return len(grp.getgrgid(info.st_gid).gr_mem) == 0
    return True


def _temporary_folder() -> Path:
    """Returns the user's folder among temporary files, which this function creates; OSError if it cannot."""
    folder = Path(tempfile.gettempdir(), f"{_NAME}-{os.geteuid()}").absolute()
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if not folder.is_symlink() and not find_fault(folder.resolve()):
        return folder
    return _new_folder(folder)


@cache
def _new_folder(occupied: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{occupied.name}-", dir=occupied.parent))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process or thread holds this lock; the kernel releases that of a process that ends."""
    with path.open("ab") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def use_folder(folder: Path) -> None:
    """Removes damaged files from a folder that no other process uses, and marks it as used until this one ends.

    Compilers write files where they are expected: a crash of the machine leaves them empty or truncated.
    """
    file = (folder / "in_use.lock").open("a+b")  # NFS locks what can be read, or exclusively what can be written
    _in_use.append(file)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder.rglob("*"):
            is_left = path.suffix in (".partial", ".tmp")  # of processes that were killed
            if path.suffix != ".lock" and path.is_file() and (is_left or _is_damaged(path)):
                path.unlink()
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)


def _is_damaged(path: Path) -> bool:
    """Returns whether a file is empty, or ELF of 64 bits that ends before its table of sections, its last part."""
    with path.open("rb") as file:
        header = file.read(64)
    if not header.startswith(b"\x7fELF\x02"):
        return not header
    if len(header) < 64:
        return True
    table, size, count = struct.unpack_from("<Q10xHH", header, 40)
    return path.stat().st_size < table + size * count


def write_with_digest(path: Path, content: bytes) -> None:
    """Writes content and its digest as a whole file; ELF may have bytes after its end.

    On a file system without locks several processes may write it, each to a temporary file of its own.
    """
    own = path.with_name(f"{path.name}.{os.urandom(8).hex()}.partial")
    write_atomically(own, content + _digest(content))
    own.rename(path)


def is_intact(path: Path) -> bool:
    """Whether a file exists, and is what write_with_digest() wrote: a damaged library would end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
