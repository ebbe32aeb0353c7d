"""Numbers in files of an object store, read in slices through a cache of blocks on the local disk.

    <cache>/ab/<digest>     a block of a file, named by its digest, the first byte of which is "ab"
            ab.lock         held while a block is added to the set of all that begin with "ab"

What is named by its content never changes: processes and runs share a cache, and a block that is damaged on the disk or
is no longer what was put into the store is recognized. Each of the sets holds its share of the limit, so that adding a
block looks at the blocks of one set only; the one that was opened least recently is removed first.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from torchtitan_clone.cache_folders import locked
from torchtitan_clone.config.messages import ConfigError
from torchtitan_clone.storage.objects import ObjectStore, StoreError, open_store

logger = logging.getLogger("torchtitan_clone")

BLOCK_BYTES = 1 << 20
"""A row of tokens is far smaller, and costs a whole block if its neighbours are not read before that is removed."""
DIGEST_BYTES = 16
SETS = 256
READ_SECONDS = 120.0
"""Time for which a request is repeated while the other ranks wait."""
_OPEN_BLOCKS = 256  # each takes a file descriptor
_BLOCKS_AT_ONCE = 32


def digest_of_block(content: bytes | memoryview) -> bytes:
    """Returns the digest that names a block."""
    return sha256(content).digest()[:DIGEST_BYTES]  # processors have instructions for it


class BlockCache:
    """Blocks in a local folder, at most `limit_bytes` of them if none is larger than BLOCK_BYTES."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = str(folder)  # joining paths takes longer than looking for a file
        self._blocks_of_set = limit_bytes // (SETS * BLOCK_BYTES)
        assert self._blocks_of_set, "a set must hold a block"

    def holds(self, digest: bytes) -> bool:
        """Returns whether a block is there, which may be damaged or removed at any time."""
        return os.path.exists(self._path(digest))

    def find(self, digest: bytes, *, verifies: bool) -> np.ndarray | None:
        """Maps the bytes of a block into memory; None if it is not there or, if that is verified, not what it was."""
        path = self._path(digest)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            with suppress(OSError):  # of another user
                os.utime(file)
            content = np.frombuffer(mmap(file, 0, access=ACCESS_READ), dtype=np.uint8)  # np.memmap takes twice as long
        except ValueError:  # an empty file cannot be mapped
            content = np.empty(0, dtype=np.uint8)
        finally:
            os.close(file)
        if (verifies or not len(content)) and digest_of_block(content.data) != digest:
            logger.warning("%s is damaged, and is fetched again", path)
            return None
        return content

    def put(self, digest: bytes, content: bytes) -> None:
        """Adds a block, after removing others if its set is full; only warns if the disk cannot hold it."""
        path = Path(self._path(digest))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.parent.with_suffix(".lock")):
                self._make_room(path.parent)
                partial = path.with_suffix(".partial")
                partial.write_bytes(content)  # not flushed: after a crash its digest tells
                partial.rename(path)
        except OSError as error:
            _warn_once(f"{path.parent.parent}: blocks cannot be cached ({error.strerror}); they are fetched each time")

    def _make_room(self, folder: Path) -> None:
        names = os.listdir(folder)
        if (excess := len(names) + 1 - self._blocks_of_set) > 0:
            oldest = sorted(names, key=lambda name: os.stat(folder / name).st_mtime_ns)
            for name in oldest[: excess + self._blocks_of_set // 16]:  # several, to sort them rarely
                (folder / name).unlink()

    def _path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self._folder}/{name[:2]}/{name}"


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


class BlockArray:
    """Numbers in an object, as one array that one thread reads in slices. ConfigError if a block cannot be fetched."""

    def __init__(
        self, objects: ObjectStore, *, name: str, size: int, digests: np.ndarray, block_bytes: int, cache: BlockCache,
        dtype: str,
    ) -> None:  # fmt: skip
        self.dtype = np.dtype(dtype)
        self._objects = objects
        self._name = name
        self._size = size
        self._digests = digests
        self._block_bytes = block_bytes
        self._per_block = block_bytes // self.dtype.itemsize
        self._cache = cache
        self._verified = np.zeros(len(digests), dtype=bool)
        """Blocks that were seen to be right."""
        self._mapped: dict[int, np.ndarray] = {}
        """Numbers of the blocks that were read last, in this order."""

    def __len__(self) -> int:
        return self._size // self.dtype.itemsize

    def __getitem__(self, positions: slice) -> np.ndarray:
        start, stop, _ = positions.indices(len(self))
        if start >= stop:
            return np.empty(0, dtype=self.dtype)
        size = self._per_block
        first, last = start // size, (stop - 1) // size
        if first == last:  # most rows
            return self._open(first)[start - first * size : stop - first * size]
        self.load([(start, stop)])
        blocks = range(first, last + 1)
        return np.concatenate([self._open(each)[max(0, start - each * size) : stop - each * size] for each in blocks])

    def load(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Fetches at once the blocks of several slices [start, stop) that are not in the cache."""
        size = self._per_block
        blocks = {block for start, stop in bounds for block in range(start // size, (stop - 1) // size + 1)}
        unmapped = sorted(blocks - self._mapped.keys())
        missing = [block for block in unmapped if not self._cache.holds(self._digest(block))]
        for first in range(0, len(missing), _BLOCKS_AT_ONCE):
            self._fetch(missing[first : first + _BLOCKS_AT_ONCE])

    def _open(self, block: int) -> np.ndarray:
        if (numbers := self._mapped.pop(block, None)) is None:
            numbers = self._read(block)
            if len(self._mapped) == _OPEN_BLOCKS:
                del self._mapped[next(iter(self._mapped))]
        self._mapped[block] = numbers
        return numbers

    def _digest(self, block: int) -> bytes:
        return self._digests[block].tobytes()

    def _read(self, block: int) -> np.ndarray:
        digest = self._digest(block)
        content = self._cache.find(digest, verifies=not self._verified[block])
        if content is None:
            content = np.frombuffer(self._fetch([block])[0], dtype=np.uint8)
        self._verified[block] = True
        return content.view(self.dtype)

    def _fetch(self, blocks: Sequence[int]) -> list[bytes]:
        """Returns the bytes of blocks from the store, and puts them into the cache."""
        size = self._block_bytes
        ranges = [(block * size, min(self._size, (block + 1) * size)) for block in blocks]
        try:
            contents = self._objects.get_ranges(self._name, ranges)
        except (StoreError, FileNotFoundError) as error:
            raise ConfigError(f"{error}; correct that, and rerun the same command to resume") from None
        for block, (begin, end), content in zip(blocks, ranges, contents, strict=True):
            if digest_of_block(content) != self._digest(block):
                what = f"bytes {begin:,} to {end:,} are not what was put there: the object was replaced or damaged"
                raise ConfigError(f"{self._objects.url}/{self._name}: {what}; put it there again, and rerun")
            self._cache.put(self._digest(block), content)
            self._verified[block] = True
        return contents


@dataclass(frozen=True, kw_only=True)
class BlockFiles:
    """Files below a URL that are read by blocks. Holds no open file, so that it can be pickled."""

    url: str
    sizes: Mapping[str, int]
    """Bytes of each file by its name, in the order of their digests."""
    digests: Path
    """Local file with the digests of the blocks of all files."""
    block_bytes: int
    cache: Path
    limit_bytes: int

    def array(self, name: str, *, dtype: str) -> BlockArray:
        """Returns the numbers in a file."""
        counts = [blocks_of(size, block_bytes=self.block_bytes) for size in self.sizes.values()]
        place = list(self.sizes).index(name)
        first = [0, *accumulate(counts)][place]
        digests = np.memmap(self.digests, dtype=np.uint8, mode="r").reshape(-1, DIGEST_BYTES)
        return BlockArray(
            _objects_at(self.url), name=name, size=self.sizes[name], digests=digests[first : first + counts[place]],
            block_bytes=self.block_bytes, cache=BlockCache(self.cache, limit_bytes=self.limit_bytes), dtype=dtype,
        )  # fmt: skip


def blocks_of(size: int, *, block_bytes: int) -> int:
    """Returns the number of blocks of a file."""
    return -(-size // block_bytes)


@cache  # its connections are shared by all files
def _objects_at(url: str) -> ObjectStore:
    return open_store(url, timeout_seconds=READ_SECONDS, option="training.dataset_path")
