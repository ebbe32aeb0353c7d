"""Checkpoints in an object store, without torch. A step is committed by its manifest, which is put last.

step-N/manifest.json           exists: the step is committed; it is put only if there is none of this name
step-N/NAME.DIGEST             a file, put before; never overwritten, since another content has another name
step-N/NAME.blocks.DIGEST      digests of the blocks of a file of tensors, so that parts of it can be verified
step-N/manifest.json.bad-REASON of a step that was found to be corrupted, .left-REASON of one that no start resumes from

Deletion begins with the manifest. Files without a manifest are being uploaded, or are garbage if they are old.
"""

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from io import FileIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_clone.checkpoint.folder import (
    MANIFEST_FILE,
    REWIND_FILE,
    STEP_NAME,
    CorruptCheckpointError,
    Manifest,
    digest_of_bytes,
    encode_manifest,
    name_aside,
    progress_to_resume,
    read_document,
    read_manifest,
    read_progress,
    steps_to_delete,
)
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.checkpoint.writer import DIGEST, DIGESTS, FileRecord
from torchtitan_clone.config.messages import ConfigError, shown
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import MAX_BYTES, DocumentError
from torchtitan_clone.files import write_atomically
from torchtitan_clone.storage.objects import (
    CHECK_SECONDS,
    CONCURRENCY,
    REQUEST_BYTES,
    ObjectStore,
    StoredObject,
    open_store,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCKS = ".blocks"
"""What the name of a file of digests ends with, after that of the file whose blocks they are of."""
TENSOR_FILES = ".safetensors"
GARBAGE_SECONDS = 24 * 3600.0
"""Age of files without a manifest after which they are deleted; no upload takes as long."""
MAX_BLOCKS_BYTES = 1 << 26
_BLOCKS_PER_FILE = 1 << 15
_SMALLEST_BLOCK, _LARGEST_BLOCK = 1 << 16, REQUEST_BYTES
_OBJECT = re.compile(rf"{STEP_NAME}/(.+)")


class Pace:
    """Limits the bytes per second of what calls `wait` before each chunk; None: no limit."""

    def __init__(self, mib_per_second: float | None) -> None:
        self._rate = mib_per_second and mib_per_second * (1 << 20)
        self._free = time.monotonic()

    def wait(self, size: int, *, beat: Callable[[], object] = lambda: None) -> None:
        """Waits until `size` more bytes fit; calls `beat` every second."""
        if self._rate is not None:
            while (seconds := self._free - time.monotonic()) > 0:
                time.sleep(min(seconds, 1.0))
                beat()
            self._free = max(self._free, time.monotonic()) + size / self._rate


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """An open file of a step, which stays readable if its folder is renamed or deleted."""

    name: str
    record: FileRecord
    file: FileIO
    algorithm: str = DIGEST


class RemoteFolder:
    """The checkpoints of a run in an object store. Errors are those of ObjectStore."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self._intact: dict[int, tuple[datetime, Manifest]] = {}

    def __str__(self) -> str:
        return self.objects.url

    def step(self, step: int) -> "RemoteStep":
        """Returns a step, without a request."""
        return RemoteStep(self.objects, step=step)

    def committed_steps(self) -> list[int]:
        """Returns the steps that have a manifest, oldest first; they may have been damaged since."""
        return sorted(step for step, objects in self._list().items() if MANIFEST_FILE in objects)

    def has_corrupt_steps(self) -> bool:
        """Returns whether a step was set aside because it was corrupted."""
        return any(_is_corrupt(objects) for objects in self._list().values())

    def newest_complete_step(self) -> "RemoteStep | None":
        """Returns the newest step whose objects have the recorded sizes and whose progress is intact."""
        for number in reversed(self.committed_steps()):
            with contextlib.suppress(CorruptCheckpointError):
                (step := self.step(number)).check_sizes()
                return step
        return None

    # ------------------------------------------------------------------ writing

    def upload(
        self, step: int, each: LocalFile, *, pace: Pace, progress: Callable[[int], object] = lambda _: None
    ) -> dict[str, FileRecord]:
        """Uploads a file, unless it is there, and the digests of its blocks; returns the record of those.

        What is there of a step that was corrupted may be damaged, and is replaced. `progress` gets the number of bytes
        before each chunk. OSError if the file is not what was recorded.
        """
        name, record = each.name, each.record
        block = block_bytes(record.bytes)
        digests: list[str] = []

        def chunks() -> Iterator[bytes]:
            digests.clear()
            for chunk in _checked_chunks(each):
                pace.wait(len(chunk), beat=lambda: progress(0))
                progress(len(chunk))
                blocks = (chunk[start : start + block] for start in range(0, len(chunk), block))
                digests.extend(digest_of_bytes(content, algorithm=each.algorithm) for content in blocks)
                yield chunk

        has_blocks, key = name.endswith(TENSOR_FILES), f"step-{step}/{name}.{record.digest}"
        if self.objects.size(key) == record.bytes and not _is_corrupt(self.step(step).objects()):
            for _ in chunks() if has_blocks else ():
                pass
        elif record.bytes <= REQUEST_BYTES:
            self.objects.put(key, b"".join(chunks()))
        else:
            self.objects.put_stream(key, chunks, size=record.bytes)
        if not has_blocks:
            return {}
        content = json.dumps({"bytes": block, "digests": digests}).encode()
        own = FileRecord(bytes=len(content), digest=digest_of_bytes(content, algorithm=each.algorithm))
        self.objects.put(f"step-{step}/{name}{BLOCKS}.{own.digest}", content)
        return {f"{name}{BLOCKS}": own}

    def commit(self, manifest: Manifest) -> bool:
        """Commits a step whose files are all there; returns False if another writer has committed it, and keeps that.

        CorruptCheckpointError if a file is missing.
        """
        step = self.step(manifest.step)
        _check_objects(step.objects(), manifest)
        content = encode_manifest(manifest)
        if self.objects.put_new(f"{step.name}/{MANIFEST_FILE}", content):
            return True
        return self.objects.get(f"{step.name}/{MANIFEST_FILE}", max_bytes=len(content) + 1) == content  # a lost answer

    # ------------------------------------------------------------------ deleting

    def purge(self, *, keep_latest_k: int, keep_every: int, keep_below: int = 0) -> list[int]:
        """Deletes and returns complete steps, as `folder.purge` chooses them; also garbage that is old enough.

        What is there of later steps than the newest complete one stays: an upload in progress may reuse it.
        """
        steps = self._list()
        complete = self._complete(steps)
        old = steps_to_delete(complete, keep_latest_k=keep_latest_k, keep_every=keep_every, keep_below=keep_below)
        for step in old:
            self.delete(step, objects=steps[step])
        kept = [step for step in steps if step not in old and step <= max(complete, default=-1)]
        self._collect_garbage({step: steps[step] for step in kept})
        return old

    def delete(self, step: int, *, objects: Mapping[str, StoredObject] | None = None) -> None:
        """Deletes a step, its manifest first."""
        found = self.step(step).objects() if objects is None else objects
        self.objects.delete([f"step-{step}/{MANIFEST_FILE}"])
        self.objects.delete([f"step-{step}/{name}" for name in found if name != MANIFEST_FILE])

    def _collect_garbage(self, steps: Mapping[int, Mapping[str, StoredObject]]) -> None:
        """Deletes files that no manifest names and that are old, by the clock of the store."""
        times = [each.modified for objects in steps.values() for each in objects.values()]
        limit = max(times, default=None) and max(times) - timedelta(seconds=GARBAGE_SECONDS)
        for step, objects in steps.items():
            if any(name.startswith(f"{MANIFEST_FILE}.") for name in objects):  # set aside, for inspection
                continue
            named = set[str]()
            if MANIFEST_FILE in objects:
                try:
                    named = {MANIFEST_FILE, *_keys(read_manifest(self.step(step), step=step))}
                except CorruptCheckpointError:
                    continue
            old = [name for name, each in objects.items() if name not in named and limit and each.modified < limit]
            self.objects.delete([f"step-{step}/{name}" for name in old])

    def set_aside(self, step: int, *, suffix: str, reason: str) -> str:
        """Renames the manifest of a step, so that it no longer counts as a checkpoint; returns the new name."""
        manifest = f"step-{step}/{MANIFEST_FILE}"
        target = name_aside(manifest, suffix=suffix, reason=reason)
        with contextlib.suppress(FileNotFoundError):
            try:
                content = self.objects.get(manifest, max_bytes=MAX_BYTES)
            except DocumentError:  # too large to be a manifest
                content = b""
            self.objects.put(target, content)
        self.objects.delete([manifest])
        return f"{self.objects.url}/{target}"

    def store_rewind(self, folder: Path) -> None:
        """Copies what `folder.record_rewind` has recorded in the local folder, so that a replaced node finds it."""
        file = folder / REWIND_FILE
        if file.exists():
            self.objects.put(REWIND_FILE, file.read_bytes())
        else:
            self.objects.delete([REWIND_FILE])

    def fetch_rewind(self, folder: Path) -> None:
        """Copies what the store has of it to a local folder that lacks it."""
        if not (folder / REWIND_FILE).exists():
            with contextlib.suppress(FileNotFoundError, DocumentError):
                content = self.objects.get(REWIND_FILE, max_bytes=4096)
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(folder / REWIND_FILE, content)

    def _complete(self, steps: Mapping[int, Mapping[str, StoredObject]]) -> list[int]:
        """Returns the steps of a listing that are complete, oldest first; reads each manifest once."""
        complete: list[int] = []
        for step in (step for step in sorted(steps) if MANIFEST_FILE in steps[step]):
            modified = steps[step][MANIFEST_FILE].modified
            with contextlib.suppress(CorruptCheckpointError):
                if self._intact.get(step, (None, None))[0] != modified:
                    self._intact[step] = (modified, self.step(step).check_sizes())
                _check_objects(steps[step], self._intact[step][1])
                complete.append(step)
        return complete

    def _list(self) -> dict[int, dict[str, StoredObject]]:
        steps: dict[int, dict[str, StoredObject]] = defaultdict(dict)
        for each in self.objects.find():
            if match := _OBJECT.fullmatch(each.name):
                steps[int(match[1])][match[2]] = each
        return steps


class RemoteStep:
    """A step in an object store, whose files of tensors are read by ranges; a StoredStep."""

    def __init__(self, objects: ObjectStore, *, step: int) -> None:
        self.name = f"step-{step}"
        self._step = step
        self._objects = objects
        self._manifest: Manifest | None = None
        self._blocks: dict[str, tuple[int, list[str]]] = {}

    def __str__(self) -> str:
        return f"{self._objects.url}/{self.name}"

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = read_manifest(self, step=self._step)
        return self._manifest

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the content of a file; FileNotFoundError, DocumentError if it is larger than `max_bytes`."""
        return self._objects.get(f"{self.name}/{self._key(name)}", max_bytes=max_bytes)

    def open(self, name: str) -> RawIOBase:
        """Opens a file; CorruptCheckpointError while reading if a block of tensors is not the recorded one."""
        size, key = self.manifest.files[name].bytes, f"{self.name}/{self._key(name)}"
        block, digests = self._blocks_of(name, size=size)
        algorithm = self.manifest.algorithm
        return RangeReader(self._objects, key, size=size, block=block, digests=digests, algorithm=algorithm)

    def _blocks_of(self, name: str, *, size: int) -> tuple[int, list[str] | None]:
        """Returns the bytes of a block of a file and the digests of all, which a document does not have."""
        if f"{name}{BLOCKS}" not in self.manifest.files:
            return _LARGEST_BLOCK, None
        if name not in self._blocks:
            document = read_document(self, f"{name}{BLOCKS}", manifest=self.manifest, max_bytes=MAX_BLOCKS_BYTES)
            table = document.table("bytes", "digests")
            block = table["bytes"].integer(low=1, high=_LARGEST_BLOCK)  # which is held in memory
            digests = [each.text() for each in table["digests"].items()]
            if len(digests) != -(-size // block):
                table["digests"].refuse(f"must have one digest for each {block} bytes of {size}")
            self._blocks[name] = (block, digests)
        return self._blocks[name]

    def check_sizes(self) -> Manifest:
        """Returns the manifest; CorruptCheckpointError if an object has another size or the progress is not intact."""
        _check_objects(self.objects(), self.manifest)
        for name in self.manifest.files:
            if name.endswith(TENSOR_FILES) and f"{name}{BLOCKS}" not in self.manifest.files:
                raise CorruptCheckpointError(f"{name} has no digests of its blocks")
        read_progress(self, manifest=self.manifest)
        return self.manifest

    def saved_at(self) -> datetime:
        """Returns when the step was committed, by the clock of the store."""
        return self.objects()[MANIFEST_FILE].modified

    def objects(self) -> dict[str, StoredObject]:
        """Returns the objects of the step by their names in it, also those that its manifest lacks."""
        return {each.name.removeprefix(f"{self.name}/"): each for each in self._objects.find(f"{self.name}/")}

    def _key(self, name: str) -> str:
        return name if name == MANIFEST_FILE else f"{name}.{self.manifest.files[name].digest}"


def _is_corrupt(objects: Iterable[str]) -> bool:
    """Returns whether a step with these objects was set aside because it was corrupted."""
    return any(name.startswith(f"{MANIFEST_FILE}.bad") for name in objects)


def _check_objects(objects: Mapping[str, StoredObject], manifest: Manifest) -> None:
    """CorruptCheckpointError if an object that a manifest names is missing or has another size."""
    for key, record in _keys(manifest).items():
        if key not in objects:
            raise CorruptCheckpointError(f"{key} is missing")
        if (size := objects[key].bytes) != record.bytes:
            raise CorruptCheckpointError(f"{key} has {size:,} bytes instead of {record.bytes:,}")


def _keys(manifest: Manifest) -> dict[str, FileRecord]:
    return {f"{name}.{record.digest}": record for name, record in manifest.files.items()}


class RangeReader(RawIOBase):
    """An object as an open file: reads the blocks that a range touches, several at once, and verifies each."""

    # blocks   |      0      |      1      |      2      |      3      |
    # range              [.....................)                          blocks 0 to 2 are read; 2 is kept, because
    # next range                                [.......)                 what follows in the file often begins there

    def __init__(
        self, objects: ObjectStore, key: str, *, size: int, block: int, digests: list[str] | None, algorithm: str
    ) -> None:
        super().__init__()
        self._objects = objects
        self._key = key
        self._size = size
        self._block = block
        self._digests = digests
        self._algorithm = algorithm
        self._position = 0
        self._last: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")
        begin, end = self._position, min(self._position + len(view), self._size)
        if begin >= end:
            return 0
        first, last = begin // self._block, (end - 1) // self._block
        at_once = max(1, REQUEST_BYTES // self._block)
        spans = [(start, min(start + at_once, last + 1)) for start in range(first, last + 1, at_once)]

        def copy(span: tuple[int, int]) -> None:
            start, content = span[0] * self._block, self._read_blocks(*span)
            low, high = max(begin, start), min(end, start + len(content))
            view[low - begin : high - begin] = content[low - start : high - start]
            if span[1] == last + 1:
                self._last = (last, content[last * self._block - start :])

        if len(spans) == 1:
            copy(spans[0])
        else:
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                list(pool.map(copy, spans))
        self._position = end
        return end - begin

    def _read_blocks(self, first: int, end: int) -> bytes:
        """Returns blocks [first, end), the first one from memory if it was the last one before."""
        kept, content = self._last  # read once: another thread may replace it
        if kept != first:
            kept, content = first - 1, b""
        begin, stop = (kept + 1) * self._block, min(end * self._block, self._size)
        if begin < stop:
            found = self._objects.get_range(self._key, begin=begin, end=stop)
            self._check(found, first=kept + 1, size=stop - begin)
            content += found
        return content

    def _check(self, content: bytes, *, first: int, size: int) -> None:
        if len(content) != size:
            raise CorruptCheckpointError(f"{self._key} ends early")
        expected = [] if self._digests is None else self._digests[first : first - (-size // self._block)]
        for index, digest in enumerate(expected):
            block = memoryview(content)[index * self._block : (index + 1) * self._block]
            if digest_of_bytes(block, algorithm=self._algorithm) != digest:
                raise CorruptCheckpointError(f"{self._key} does not match the digest of its block {first + index}")


def open_remote(url: str, *, timeout_seconds: float) -> RemoteFolder:
    """Returns the checkpoints of a URL, without a request; ConfigError as open_store()."""
    return RemoteFolder(open_store(url, timeout_seconds=timeout_seconds))


def check_store(checkpoint: Checkpoint, *, writes: bool) -> Progress | None:
    """Returns the progress to resume from the newest complete step in a store; None if there is none.

    ConfigError if it does not answer in a short time or, with `writes`, nothing can be put there.
    """
    with _refused(url := checkpoint.folder):
        remote = open_remote(url, timeout_seconds=CHECK_SECONDS)
        if writes:
            remote.objects.put("write-check", b"")
        newest = remote.newest_complete_step()
        return newest and progress_to_resume(newest, checkpoint=checkpoint)


def has_step(url: str, *, step: int) -> bool:
    """Returns whether a step is committed in a store; ConfigError as check_store()."""
    with _refused(url):
        return step in open_remote(url, timeout_seconds=CHECK_SECONDS).committed_steps()


@contextlib.contextmanager
def _refused(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, CorruptCheckpointError) as error:
        remedy = "check the URL, the credentials in the environment and the network, or set a local folder"
        raise ConfigError(f"checkpoint.folder = {shown(url)}: {error}; {remedy}") from None


def block_bytes(size: int) -> int:
    """Returns the bytes of a block of a file of this size: small, so that a range reads little more than it needs."""
    wanted = size // _BLOCKS_PER_FILE
    return min(max(_SMALLEST_BLOCK, 1 << wanted.bit_length()), _LARGEST_BLOCK)


def as_local(manifest: Manifest) -> Manifest:
    """Returns the manifest of the same step in a folder, which has no digests of blocks."""
    files = {name: record for name, record in manifest.files.items() if not name.endswith(BLOCKS)}
    return replace(manifest, files=files)


def _checked_chunks(each: LocalFile) -> Iterator[bytes]:
    """Yields a file in chunks; OSError instead of the last one if it is not what was recorded."""
    digest, position = DIGESTS[each.algorithm](), 0
    chunk = b""
    while position < each.record.bytes:
        chunk = os.pread(each.file.fileno(), min(REQUEST_BYTES, each.record.bytes - position), position)
        digest.update(chunk)
        position += len(chunk)
        if not chunk or position == each.record.bytes:
            break
        yield chunk
    if position != each.record.bytes or digest.hexdigest() != each.record.digest:
        raise OSError(f"the local copy of {each.name} is not what was written; check the disk it is on")
    yield chunk
