"""The folder that a run writes to: locked against a second run, and recreated if it is deleted while training."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_clone.checkpoint.folder import CONFIG_FILE
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.config import ConfigError, to_toml
from torchtitan_clone.documents import DocumentError, read_json
from torchtitan_clone.files import write_atomically
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.state import TrainingError

logger = logging.getLogger("torchtitan_clone")

LOCK_FILE = "run.lock"
SECONDS_TO_EXIT = 2.0
"""Time for which a process that was killed on this machine may still hold the lock."""
LEASE_SECONDS = 120.0
"""Time after which an NFS server has released the locks of a machine that is gone; 90 s by default."""
_POLL_SECONDS = 0.1
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock, as its file names it; an empty host if the file does not."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}" if self.host else "another process"


UNKNOWN = Holder(host="", pid=0, started="")


class RunFolder:
    """The output folder of a run, locked for as long as this object or the process lives. Rank 0 has one.

    A replica group locks its own folder in the run's folder, which it locks too, shared with the other groups. A
    checkpoint folder outside of the run's folder is locked too: two runs would delete each other's steps.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        checkpoint, is_group = plan.config.checkpoint, plan.config.fault_tolerance.enable
        self._locks = [_Lock(plan.folder, remedy="choose another job.run_name", is_shared=is_group)]
        if is_group:
            self._locks.append(_Lock(plan.output_folder, remedy="choose another fault_tolerance.replica_id"))
        is_elsewhere = not plan.checkpoint_folder.resolve().is_relative_to(plan.folder.resolve())
        if checkpoint.enable and not checkpoint.load_only and is_elsewhere:
            remedy = "choose another checkpoint.folder"
            self._locks.append(_Lock(plan.checkpoint_folder, remedy=remedy, is_shared=is_group))

    def lock(self) -> None:
        """Locks all folders of the run. ConfigError, after a wait, if another process has one."""
        for lock in self._locks:
            lock.acquire()

    def ensure(self) -> None:
        """Recreates the folder, its locks and config.toml if they were deleted; cheap otherwise.

        TrainingError if another process has a folder of this name by now, or it cannot be recreated.
        """
        for lock in self._locks:
            if not lock.is_in_place():
                try:
                    lock.acquire(can_wait=False)
                    write_config(self._plan)
                except (ConfigError, OSError) as error:
                    raise TrainingError(f"{lock.folder} was deleted during training: {error}") from None
                logger.warning("%s was deleted while training; it is recreated, and training continues", lock.folder)


def write_config(plan: RunPlan) -> None:
    """Writes the options that repeat the run into the output folder, atomically; only warns if it cannot."""
    try:
        plan.output_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(plan.output_folder / CONFIG_FILE, describe_config(plan).encode())
    except OSError as error:
        text = "%s/%s cannot be written: %s; the run continues, but the file does not show its options"
        logger.warning(text, plan.output_folder, CONFIG_FILE, error.strerror)


def record_config(plan: RunPlan, *, checkpoints: CheckpointManager, rank: int) -> None:
    """Writes the options that repeat the run into later checkpoints and, on rank 0, into the output folder."""
    checkpoints.extra_files[CONFIG_FILE] = describe_config(plan)
    if rank == 0:
        write_config(plan)


def describe_config(plan: RunPlan) -> str:
    """Returns the options that repeat the run as TOML: data.skip_steps also names what it passed over after spikes."""
    skipped = plan.mixture.timeline.skipped if plan.mixture else ()
    data = replace(plan.config.data, skip_steps=[[*each] for each in skipped])
    return to_toml(replace(plan.config, data=data))


class _Lock:
    """A POSIX lock on run.lock in a folder: the kernel, or an NFS server, releases it when the process ends."""

    def __init__(self, folder: Path, *, remedy: str, is_shared: bool = False) -> None:
        self.folder = folder
        self._path = folder / LOCK_FILE
        self._remedy = remedy
        self._mode = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._descriptor: int | None = None

    def __del__(self) -> None:
        self._close()

    def acquire(self, *, can_wait: bool = True) -> None:
        """Locks the folder, and creates it first if necessary. ConfigError, after a wait, if another process has it."""
        start = time.monotonic()
        is_logged = False
        while (holder := self._try_lock()) is not None:
            is_here = holder.host == socket.gethostname()
            limit = SECONDS_TO_EXIT if is_here else LEASE_SECONDS
            if not can_wait or time.monotonic() - start > limit:
                remedy = f"stop that process and wait until it has ended, or {self._remedy}"
                raise ConfigError(f"the folder {self.folder} is in use by {holder}; {remedy}")
            if not is_here and not is_logged:
                is_logged = True
                message = "%s is in use by %s: waiting up to %.0f s, in case that machine is gone"
                logger.warning(message, self.folder, holder, LEASE_SECONDS)
            time.sleep(_POLL_SECONDS)

    def _try_lock(self) -> Holder | None:
        """Locks the file; returns the process that has it locked, if any."""
        self._close()
        descriptor = self._descriptor = self._open()
        try:
            fcntl.lockf(descriptor, self._mode | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return self._holder()
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning("%s cannot be locked (%s): a second run here would not be noticed", self._path, error)
        if not self.is_in_place():  # deleted since it was opened
            return UNKNOWN
        own = Holder(host=socket.gethostname(), pid=os.getpid(), started=time.strftime("%Y-%m-%d %H:%M:%S"))
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(own)).encode(), 0)
        return None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be opened: {error.strerror}; choose another folder") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ConfigError(f"{self._path}: must be a regular file; delete it")
        return descriptor

    def _holder(self) -> Holder:
        try:
            values = read_json(self._path, max_bytes=4096).table("host", "pid", "started")
            host, pid, started = values["host"].text(), values["pid"].integer(), values["started"].text()
        except (DocumentError, OSError):
            return UNKNOWN
        return Holder(host=host, pid=pid, started=started)

    def is_in_place(self) -> bool:
        """Whether the lock's file is still the one of this name."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the storage does not answer, which is no deletion
            return True

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
