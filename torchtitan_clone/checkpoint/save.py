"""One save: each rank stages and writes its file, and reports to rank 0, which commits.

A save starts in one collective of all ranks (manager.py). Then each rank works on its own, in a thread with an
`async_mode`. How a rank writes depends on the mode, and falls back to the next simpler one:

    async_with_pinned_mem   tensors -> staging buffer -> a process writes the file
    async                   tensors -> staging buffer -> a thread writes the file
    disabled                tensors -> the file, while training waits
"""

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.agree import NodeCopies
from torchtitan_clone.checkpoint.folder import (
    MANIFEST_FILE,
    PROGRESS_FILE,
    Manifest,
    commit,
    purge,
    step_folder,
    write_manifest,
)
from torchtitan_clone.checkpoint.format import INDEX_FILE, FileLayout
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.checkpoint.tensor_file import file_content
from torchtitan_clone.checkpoint.writer import DIGEST, FileRecord, WriterLostError, WriterProcess, chunks_of, write_file
from torchtitan_clone.config.environment import STOP_SIGNALS
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.config.urls import store_url
from torchtitan_clone.documents import shorten
from torchtitan_clone.files import format_bytes
from torchtitan_clone.torch_compat import default_store

logger = logging.getLogger("torchtitan_clone")

DIRECT = "disabled"
THREAD = "async"
PROCESS = "async_with_pinned_mem"
_ATTEMPTS = 2
_SPACE_FACTOR = 1.02  # free disk space that a save requires, as a multiple of its size
_MAX_PAUSE_SECONDS = 0.05
_TIMEOUT_FACTOR = 3  # two attempts of another rank's writer process and one of its thread
_MADV_POPULATE_WRITE = 23
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


class StagingBuffer:
    """Shared memory for one file, reused by every save; pinned if CUDA is available. OSError if there is too little."""

    def __init__(self, layout: FileLayout):
        self._layout = layout
        # Unlike a file in /dev/shm, it disappears with its process and does not count against the size of that mount.
        self.descriptor = os.memfd_create("torchtitan_clone_checkpoint")
        try:
            self._map = _reserve(self.descriptor, size=layout.bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.Event | None = None

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)

    def prepare(self) -> None:
        """Writes the header and touches every page: page faults would make the first save ten times slower."""
        self._bytes[:: mmap.PAGESIZE] = 0
        self._bytes[: len(self._layout.header)] = np.frombuffer(self._layout.header, dtype=np.uint8)
        if self._stream is not None:
            runtime: Any = torch.cuda.cudart()  # Any: torch has no type for it
            with torch.cuda.stream(self._stream):
                error = runtime.cudaHostRegister(self._bytes.ctypes.data, self._layout.bytes, _PORTABLE)
            if int(error) != 0:
                logger.warning("staging memory cannot be pinned (CUDA error %s): copies will be slower", int(error))

    def follow_current_stream(self) -> None:
        """On CUDA, makes later copies of `stage` wait for the work queued on the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def stage(self, state: dict[str, Tensor]) -> None:
        """Copies the shards: CPU tensors synchronously, CUDA tensors asynchronously on a separate stream."""
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for placement, source in self._layout.shards(state):
                target = self._bytes[placement.begin : placement.end]
                if source.is_cuda:
                    torch.from_numpy(target).copy_(source, non_blocking=True)
                else:
                    np.copyto(target, source.numpy())  # without the interpreter lock, in one thread
        if self._stream is not None:
            self._copied = self._stream.record_event()

    def hold_current_stream(self) -> None:
        """On CUDA, makes work that is queued on the current stream from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait_for_copies(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        if self._stream is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._bytes.ctypes.data)
        del self._bytes
        self._map.close()
        os.close(self.descriptor)


def _reserve(descriptor: int, *, size: int) -> mmap.mmap:
    """Allocates all pages of the shared memory; huge pages, if available, halve the time of a copy."""
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: Linux before 5.14
            raise
        os.posix_fallocate(descriptor, 0, size)
    return memory


class RankFile:
    """Writes this rank's file, once per save: from the tensors, or from a staging `buffer` by a thread or a process."""

    def __init__(self, layout: FileLayout, *, mode: str, timeout_seconds: float):
        self.layout = layout
        self.buffer = None if mode == DIRECT else _build_buffer(layout)
        self._writer: WriterProcess | None = None
        if self.buffer is not None and mode == PROCESS:
            self._writer = WriterProcess(
                self.buffer.descriptor, timeout_seconds=timeout_seconds, ignored_signals=STOP_SIGNALS
            )

    @property
    def writer_pid(self) -> int | None:
        return self._writer.pid if self._writer else None

    def prepare(self) -> None:
        """Does the setup that the first save would wait for; may run in another thread."""
        if self.buffer is not None:
            self.buffer.prepare()
        if self._writer is not None:
            with contextlib.suppress(WriterLostError):  # the first save tries again and warns
                self._writer.start()

    def write(self, path: Path, *, state: dict[str, Tensor]) -> FileRecord:
        """Writes the staged copy, or else the tensors of `state`. Raises OSError if the disk fails."""
        if self.buffer is None:
            shards = (shard for _, shard in self.layout.shards(state))
            return write_file(path, file_content(self.layout.header, shards))
        if self._writer is not None and (record := self._write_by_process(path, self._writer)):
            return record
        return write_file(path, chunks_of(self.buffer.view), direct=True)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self.buffer is not None:
            self.buffer.close()

    def _write_by_process(self, path: Path, process: WriterProcess) -> FileRecord | None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return process.write(path, size=self.layout.bytes)
            except WriterLostError as lost:
                logger.warning("checkpoint: %s; attempt %d of %d", lost, attempt, _ATTEMPTS)
        logger.warning('checkpoint: falling back to a writer thread, as with checkpoint.async_mode = "%s"', THREAD)
        self._writer = None
        return None


def _build_buffer(layout: FileLayout) -> StagingBuffer | None:
    try:
        return StagingBuffer(layout)
    except OSError as error:
        what = f"cannot allocate {format_bytes(layout.bytes)} of memory for staging ({error.strerror})"
        remedy = f'training waits for each save, as with checkpoint.async_mode = "{DIRECT}"'
        logger.warning("checkpoint: %s; %s", what, remedy)
        return None


@dataclass(kw_only=True)
class SaveReport:
    """The result of one save: `error` is None if it was committed. Only rank 0 knows `seconds` and `error`.

    `seconds` is the time from start to commit, of which training waited for `blocked_seconds`.
    """

    step: int
    bytes: int
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    staging_seconds: float = 0.0
    error: str | None = None


class SaveVotes:
    """What the ranks report of one save, and the outcome that rank 0 announces.

    They travel through the store of the process group: a collective would block training.
    """

    REMEDY = "check the log and the disk of that machine, or increase checkpoint.writer_timeout_seconds"

    def __init__(self, save_id: str):
        self._id = save_id
        self._store = default_store()

    def report(self, files: Mapping[str, FileRecord], *, error: str | None) -> None:
        records = {name: asdict(record) for name, record in files.items()}
        self._store.set(self._key(dist.get_rank()), json.dumps({"files": records, "error": error}))

    def collect(self, *, timeout_seconds: float) -> dict[str, FileRecord]:
        """Returns the files of all ranks. OSError with the error of a rank, TimeoutError if ranks have not reported."""
        keys = [self._key(rank) for rank in range(dist.get_world_size())]
        if not _wait_until(lambda: self._store.check(keys), timeout_seconds=timeout_seconds):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TimeoutError(f"ranks {missing} did not finish writing within {timeout_seconds:g} s; {self.REMEDY}")
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        if (error := next((answer["error"] for answer in answers if answer["error"]), None)) is not None:
            raise OSError(error)
        return {name: FileRecord(**record) for answer in answers for name, record in answer["files"].items()}

    def share(self, documents: Mapping[str, str]) -> None:
        """Hands the documents of the step to other nodes, before the outcome is announced."""
        self._store.set(self._key("documents"), json.dumps(documents))

    def documents(self) -> dict[str, str]:
        """Returns what rank 0 has shared."""
        return json.loads(self._store.get(self._key("documents")))

    def announce(self, error: str | None) -> None:
        self._store.set(self._key("outcome"), json.dumps(error))

    def outcome(self, *, timeout_seconds: float) -> str | None:
        """Waits for the outcome that rank 0 announces: an error, or None for committed."""
        key = self._key("outcome")
        if not _wait_until(lambda: self._store.check([key]), timeout_seconds=timeout_seconds):
            return f"rank 0 did not commit within {timeout_seconds:g} s; {self.REMEDY}"
        return json.loads(self._store.get(key))

    def forget(self) -> None:
        """Deletes the outcome and what was shared, once all ranks know it."""
        for name in ("outcome", "documents"):
            self._store.delete_key(self._key(name))

    def _key(self, name: object) -> str:
        return f"checkpoint/{self._id}/{name}"


def _wait_until(condition: Callable[[], bool], *, timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    pause_seconds = 0.001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
    return True


class StepUpload(Protocol):
    """What copies the files of a save to an object store, where there is one."""

    def add(self, path: Path, *, record: FileRecord) -> None: ...
    def submit(self, manifest: Manifest | None = None, *, keep_below: int = 0) -> None: ...
    def discard(self) -> None: ...


class Save:
    """A save in progress. `finished` is set once this rank has done its share."""

    # training   start | step ......... step ........... step ....... | outcome, before the next save
    # thread           | stage | write ........ report |
    # rank 0                   | write ...... report | collect | commit | announce
    #            ^ collective  ^ staged: the state may change; on a GPU the stream waits for it, not the CPU

    def __init__(
        self, progress: Progress, *, folder: Path, save_id: str, file: RankFile, checkpoint: Checkpoint, group: str,
        upload: StepUpload | None = None, is_folder_shared: bool = True, peers: NodeCopies | None = None,
    ):  # fmt: skip
        self.report = SaveReport(step=progress.step, bytes=file.layout.total_bytes)
        self._file = file
        self.votes = SaveVotes(save_id)
        self._staged = Event()
        self.finished = Event()
        self._start = time.perf_counter()
        self._progress = progress
        self._folder = folder
        self._partial = folder / f"step-{progress.step}.partial-{group and f'{group}-'}{save_id}"
        self._options = checkpoint
        self._upload = upload
        self._peers = peers
        self._is_by_node = not is_folder_shared
        """Whether each node has a folder of its own, so that the step is complete in the object store only."""

    def run(self, state: dict[str, Tensor], *, extra_files: Mapping[str, str]) -> None:
        """Does this rank's share: stages, writes and reports; rank 0 then collects the reports and commits."""
        try:
            self._write(state)
            if dist.get_rank() == 0:
                self.report.error = self._collect_and_commit(extra_files)
                self.report.seconds = time.perf_counter() - self._start
                if self.report.error is not None:
                    warn_of_failure(self.report.step, self.report.error)
                self.votes.announce(self.report.error)
            elif self._peers is not None and self._peers.leads:
                self._commit_on_node()
        finally:
            self._staged.set()
            self.finished.set()

    def wait_for_staging(self) -> None:
        """Waits until this rank's state is copied; on a GPU, lets later work of the current stream wait instead."""
        start = time.perf_counter()
        self._staged.wait()
        if self._file.buffer is not None:
            self._file.buffer.hold_current_stream()
        self.report.blocked_seconds += time.perf_counter() - start

    def outcome(self) -> str | None:
        """Waits, for a bounded time, until rank 0 announces an error, or None for committed."""
        timeout_seconds = self._outcome_seconds
        error = self.votes.outcome(timeout_seconds=timeout_seconds)
        if error is None:
            self.finished.wait(timeout_seconds)
            if self._is_by_node and self._peers is None:
                shutil.rmtree(self._partial, ignore_errors=True)
        elif self.votes.outcome(timeout_seconds=0) == error:  # announced: no commit follows
            shutil.rmtree(self._partial, ignore_errors=True)  # that of this node, if it is not shared
        return error

    @property
    def _outcome_seconds(self) -> float:
        """Time within which rank 0 announces the outcome."""
        return (_TIMEOUT_FACTOR + 1) * self._options.writer_timeout_seconds

    def _write(self, state: dict[str, Tensor]) -> None:
        """Writes this rank's file, exchanges it with peers, if there are some, and reports it or the error."""
        records, error = dict[str, FileRecord](), None
        try:
            if (buffer := self._file.buffer) is not None:
                start = time.perf_counter()
                buffer.stage(state)
                self._staged.set()
                buffer.wait_for_copies()
                self.report.staging_seconds = time.perf_counter() - start
            self._partial.mkdir(parents=True, exist_ok=True)
            name = self._file.layout.file
            records[name] = self._file.write(self._partial / name, state=state)
            if self._upload is not None:
                self._upload.add(self._partial / name, record=records[name])
                if dist.get_rank() != 0:
                    self._upload.submit()
        except Exception as problem:  # noqa: BLE001, rank 0 must learn of every error
            error = f"rank {dist.get_rank()}: {describe_error(problem)}"
        if self._peers is not None:
            self._peers.exchange(self._partial, own=next(iter(records), None))
        self.votes.report(records if error is None else {}, error=error)

    def _collect_and_commit(self, extra_files: Mapping[str, str]) -> str | None:
        try:
            files = self.votes.collect(timeout_seconds=_TIMEOUT_FACTOR * self._options.writer_timeout_seconds)
            self._commit(files, extra_files={**extra_files, INDEX_FILE: self._file.layout.index})
        except Exception as error:  # noqa: BLE001, the other ranks must learn of every error
            shutil.rmtree(self._partial, ignore_errors=True)
            if self._upload is not None:
                self._upload.discard()
            return describe_error(error)
        return None

    def _commit(self, files: dict[str, FileRecord], *, extra_files: Mapping[str, str]) -> None:
        final = step_folder(self._folder, self.report.step)
        sizes = {name: (self._partial / name).lstat().st_size for name in files if (self._partial / name).is_file()}
        absent = [name for name, record in files.items() if sizes.get(name) != record.bytes]
        if absent and not self._is_by_node:
            what = f"rank 0 does not find {shorten(', '.join(absent))} in {self._partial} as other ranks wrote it"
            raise OSError(f"{what}; all nodes must share job.dump_folder")
        written = list(files)
        complete(self._partial, files=files, extra_files=extra_files, progress=self._progress)
        if self._upload is not None:
            for name in files.keys() - written:
                self._upload.add(self._partial / name, record=files[name])
        if self._peers is not None:
            names = [*(files.keys() - written), MANIFEST_FILE]
            self.votes.share({name: (self._partial / name).read_text() for name in names})
        if self._is_by_node and self._peers is None:
            shutil.rmtree(self._partial, ignore_errors=True)
        else:
            commit(self._partial, final)
            self._purge()
        if self._upload is not None:
            manifest = Manifest(step=self.report.step, algorithm=DIGEST, files=files)
            self._upload.submit(manifest, keep_below=self._progress.suspect_step)

    def _commit_on_node(self) -> None:
        """Commits the part of this node, once rank 0 has committed its own; a failure is a warning."""
        if self.votes.outcome(timeout_seconds=self._outcome_seconds) is not None:
            return
        try:
            for name, text in self.votes.documents().items():
                write_file(self._partial / name, [text.encode()])
            commit(self._partial, step_folder(self._folder, self.report.step))
            self._purge()
        except OSError as error:
            text = "rank %d cannot keep its node's part of step %d: %s"
            logger.warning(text, dist.get_rank(), self.report.step, describe_error(error))

    def _purge(self) -> None:
        options, is_local = self._options, store_url(self._options) is not None
        try:
            purge(
                self._folder,
                keep_latest_k=options.local_keep_latest_k if is_local else options.keep_latest_k,
                keep_every=0 if is_local else options.keep_every,
                keep_below=self._progress.suspect_step,
                has_all_files=not self._is_by_node,
            )
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be deleted: %s", self._folder, describe_error(error))


def finalize(
    partial: Path, final: Path, *, files: dict[str, FileRecord], extra_files: Mapping[str, str], progress: Progress
) -> None:
    """Adds all other files to the files of tensors, the manifest last, and commits."""
    complete(partial, files=files, extra_files=extra_files, progress=progress)
    commit(partial, final)


def complete(
    partial: Path, *, files: dict[str, FileRecord], extra_files: Mapping[str, str], progress: Progress
) -> None:
    """Adds all other files to the files of tensors, and to `files`; the manifest last."""
    for name, text in {**extra_files, PROGRESS_FILE: json.dumps(progress.to_json(), indent=1)}.items():
        files[name] = write_file(partial / name, [text.encode()])
    write_manifest(partial, step=progress.step, files=files)


def save_thread() -> ThreadPoolExecutor:
    """Returns the thread of all saves of a run, which uses the GPU of this rank."""
    # A thread begins with the first GPU, where the streams of other ranks would open a context each.
    use_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=use_gpu)


def lack_of_space(folder: Path, *, size: int) -> str | None:
    """Returns why a save of that size does not fit on the disk, or None."""
    try:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    except OSError as error:  # the other ranks wait for this one's answer
        return describe_error(error)
    if free >= size * _SPACE_FACTOR:
        return None
    needs = f"it needs {format_bytes(size)}, and {existing} has {format_bytes(free)} free"
    return f"{needs}; free disk space or lower checkpoint.keep_latest_k"


def warn_of_failure(step: int, error: str) -> None:
    """Logs why a step is not saved, which does not end the run."""
    logger.warning("step %d could not be saved: %s; training continues without this checkpoint", step, error)


def describe_error(error: Exception) -> str:
    """Returns the message of an error, with the file name of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
