"""Copies steps to an object store while training continues.

An *upload* is what one rank copies of one step: its file, and on rank 0 the other files and the manifest, once all
ranks have reported. Files are open from the moment they are written: a local step may be renamed or deleted meanwhile.
"""

import logging
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from torchtitan_clone.checkpoint.agree import gather
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError, Manifest, read_manifest
from torchtitan_clone.checkpoint.remote import LocalFile, Pace, RemoteFolder
from torchtitan_clone.checkpoint.save import SaveVotes, describe_error
from torchtitan_clone.checkpoint.writer import DIGEST, FileRecord
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import DocumentError, open_regular, shorten
from torchtitan_clone.files import format_bytes

logger = logging.getLogger("torchtitan_clone")

SECONDS_BETWEEN_REPORTS = 30.0
_SECONDS_BETWEEN_BEATS = 1.0


class UploadVotes(SaveVotes):
    """What the ranks report of one upload; `beat` says that one still makes progress."""

    REMEDY = "check the log and the network of that machine, or increase checkpoint.store_timeout_seconds"

    def __init__(self, save_id: str) -> None:
        super().__init__(f"{save_id}/upload")
        self._last_beat = 0.0

    def beat(self) -> None:
        if (now := time.monotonic()) - self._last_beat > _SECONDS_BETWEEN_BEATS:
            self._last_beat = now
            self._store.add(self._key("beats"), 1)

    def collect(self, *, timeout_seconds: float) -> dict[str, FileRecord]:
        """Waits as long as some rank makes progress within the timeout; errors as in the base class."""
        while True:
            before = self._store.add(self._key("beats"), 0)
            try:
                files = super().collect(timeout_seconds=timeout_seconds)
            except TimeoutError:
                if self._store.add(self._key("beats"), 0) == before:
                    raise
            else:
                self._store.delete_key(self._key("beats"))
                return files


class Upload:
    """The files of one step that this rank uploads; on rank 0, `submit` with the manifest commits the step."""

    def __init__(self, uploader: "Uploader", *, step: int, votes: UploadVotes) -> None:
        self.step = step
        self.votes = votes
        self.files: list[LocalFile] = []
        self.manifest: Manifest | None = None
        self.problem: str | None = None
        self.keep_below = 0
        self._uploader = uploader

    def add(self, path: Path, *, record: FileRecord, algorithm: str = DIGEST) -> None:
        """Opens a file that was written. OSError."""
        file = open_regular(path)
        self.files.append(LocalFile(name=path.name, record=record, file=file, algorithm=algorithm))

    def submit(self, manifest: Manifest | None = None, *, keep_below: int = 0) -> None:
        """Starts the upload, which a thread does."""
        self.manifest, self.keep_below = manifest, keep_below
        self._uploader.submit(self)

    def discard(self) -> None:
        """Closes the files."""
        while self.files:
            self.files.pop().file.close()


class Uploader:
    """Uploads the steps of a run, one after another. `failure` is why the newest one is not in the store, if it is not.

    Each rank has one, and ranks begin the same uploads in the same order. `known` are the steps that the store has or
    that were begun, `is_wanted` whether the step that is due is for the store.
    """

    def __init__(self, remote: RemoteFolder, *, checkpoint: Checkpoint) -> None:
        self.failure: str | None = None
        self.known: set[int] = set()
        self.is_wanted = True
        self._remote = remote
        self._options = checkpoint
        self._pace = Pace(checkpoint.upload_mib_per_second)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._running: list[Future[None]] = []
        self._reported = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether this rank still uploads a step."""
        return any(not each.done() for each in self._running)

    def begin(self, step: int, *, save_id: str) -> Upload:
        """Returns an upload without files."""
        self.known.add(step)
        return Upload(self, step=step, votes=UploadVotes(save_id))

    def begin_folder(self, folder: Path, *, step: int, save_id: str) -> None:
        """Uploads a committed step, each rank its share of the files that it finds. Collective."""
        upload, manifest = self.begin(step, save_id=save_id), None
        here = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        holders = defaultdict[str, list[int]](list)
        for rank, names in enumerate(gather(here)):
            for name in names.items():
                holders[name.text()].append(rank)
        try:
            manifest = read_manifest(folder, step=step)
            for number, name in enumerate(manifest.files):
                ranks = holders[name] or [0]
                if ranks[number % len(ranks)] == dist.get_rank():
                    upload.add(folder / name, record=manifest.files[name], algorithm=manifest.algorithm)
        except (OSError, CorruptCheckpointError, DocumentError) as error:
            upload.problem = f"rank {dist.get_rank()}: {folder}: {error}"
        upload.submit(manifest if dist.get_rank() == 0 else None)

    def submit(self, upload: Upload) -> None:
        running = [each for each in self._running if not each.done()]
        self._running = [*running, self._thread.submit(self._run, upload)]

    def finish(self) -> None:
        """Waits for all uploads, which end within a bounded time after the store has ceased to answer."""
        for each in self._running:
            each.result()

    def _run(self, upload: Upload) -> None:
        start, size = time.perf_counter(), sum(each.record.bytes for each in upload.files)
        try:
            error = self._upload(upload, start=start, size=size)
        except Exception as problem:  # noqa: BLE001, the other ranks must learn of every error
            error = describe_error(problem)
        finally:
            upload.discard()
        self.failure = error
        if error is not None and dist.get_rank() == 0:
            text = "step %d is not in %s: %s; training continues, and the step is in the local folder only"
            logger.warning(text, upload.step, self._remote, shorten(error, max_chars=600))

    def _upload(self, upload: Upload, *, start: float, size: int) -> str | None:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            upload.votes.beat()
            if dist.get_rank() == 0 and time.monotonic() - self._reported > SECONDS_BETWEEN_REPORTS:
                self._reported = time.monotonic()
                rate = format_bytes(round(done / (time.perf_counter() - start)))
                text = "uploading step %d: %s of %s of rank 0, %s/s"
                logger.info(text, upload.step, format_bytes(done), format_bytes(size), rate)

        self._reported = time.monotonic()
        try:
            if upload.problem is not None:
                raise OSError(upload.problem)
            records: dict[str, FileRecord] = {}
            for each in upload.files:
                records |= self._remote.upload(upload.step, each, pace=self._pace, progress=progress)
        except Exception as error:
            upload.votes.report({}, error=describe_error(error))
            raise
        upload.votes.report(records, error=None)
        if upload.manifest is None:
            return None
        blocks = upload.votes.collect(timeout_seconds=2 * self._options.store_timeout_seconds)
        return self._commit(replace(upload.manifest, files={**upload.manifest.files, **blocks}), upload, start=start)

    def _commit(self, manifest: Manifest, upload: Upload, *, start: float) -> str | None:
        try:
            if not self._remote.commit(manifest):
                return (
                    "another process has committed this step there, and it is kept; give each run a prefix of its own"
                )
        except CorruptCheckpointError as error:
            return f"{error} after it was uploaded"
        seconds, size = time.perf_counter() - start, sum(record.bytes for record in manifest.files.values())
        rate = format_bytes(round(size / seconds))
        logger.info(
            "step %d is in %s: %s in %.1f s, %s/s", upload.step, self._remote, format_bytes(size), seconds, rate
        )
        try:
            self._remote.purge(
                keep_latest_k=self._options.keep_latest_k,
                keep_every=self._options.keep_every,
                keep_below=upload.keep_below,
            )
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be deleted: %s", self._remote, error)
        return None
