"""Blocks of an object in a cache that several readers share."""

import os
import threading
import uuid
from itertools import islice

import numpy as np
import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.storage.blocks import BLOCK_BYTES, SETS, BlockArray, BlockCache, blocks_of, digest_of_block
from torchtitan_clone.storage.objects import open_store

BLOCK = 64
NUMBERS = np.random.default_rng(0).integers(0, 1 << 16, 1000).astype(np.uint16)


@pytest.fixture
def objects():
    """Returns a store with the object `numbers`."""
    store = open_store(f"memory://{uuid.uuid4().hex}/x", timeout_seconds=1)
    store.put("numbers", NUMBERS.tobytes())
    return store


def open_array(objects, folder, *, blocks_of_set: int = 4, **changes) -> BlockArray:
    content = NUMBERS.tobytes()
    digests = [digest_of_block(content[start : start + BLOCK]) for start in range(0, len(content), BLOCK)]
    assert len(digests) == blocks_of(len(content), block_bytes=BLOCK)
    options = {
        "name": "numbers", "size": len(content), "block_bytes": BLOCK, "dtype": "uint16",
        "digests": np.array([np.frombuffer(digest, dtype=np.uint8) for digest in digests]),
        "cache": BlockCache(folder, limit_bytes=blocks_of_set * SETS * BLOCK_BYTES),
    }  # fmt: skip
    return BlockArray(objects, **{**options, **changes})


def cached(folder) -> list:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


def test_slices_are_those_of_the_object(objects, tmp_path):
    array = open_array(objects, tmp_path)
    assert (len(array), array.dtype) == (1000, np.uint16)
    for start in (0, 1, 31, 32, 33, 500, 999, 1000):
        for stop in (0, 1, 32, 33, 64, 517, 1000, 2000):
            assert np.array_equal(array[start:stop], NUMBERS[start:stop]), (start, stop)
    assert len(cached(tmp_path)) == 32
    read = objects.bytes_read
    assert np.array_equal(open_array(objects, tmp_path)[:], NUMBERS)
    assert objects.bytes_read == read, "all blocks are in the cache"


def test_a_block_that_is_damaged_on_the_disk_is_fetched_again(objects, tmp_path, caplog):
    open_array(objects, tmp_path).load([(0, 1000)])
    for path, content in zip(cached(tmp_path), (b"", b"x" * BLOCK, b"short"), strict=False):
        path.write_bytes(content)
    assert np.array_equal(open_array(objects, tmp_path)[:], NUMBERS)
    assert caplog.text.count("is damaged, and is fetched again") == 3
    assert all(digest_of_block(path.read_bytes()).hex() == path.name for path in cached(tmp_path))


def test_readers_share_a_cache_that_never_exceeds_its_limit(objects, tmp_path):
    most: list[int] = []
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            names = [path.parent.name for path in cached(tmp_path)]
            most.append(max(map(names.count, names), default=0))

    def read(seed: int) -> None:
        array = open_array(objects, tmp_path, blocks_of_set=1)
        for start in np.random.default_rng(seed).integers(0, 990, 400).tolist():
            array.load([(start, start + 10)])
            assert np.array_equal(array[start : start + 10], NUMBERS[start : start + 10])

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    is_done.set()
    watcher.join()
    assert max(most) == 1
    assert len({path.parent.name for path in cached(tmp_path)}) < 32, "some blocks were of one set"


def test_the_block_that_was_opened_least_recently_is_removed(tmp_path):
    cache = BlockCache(tmp_path, limit_bytes=2 * SETS * BLOCK_BYTES)
    contents = (number.to_bytes(8, "big") for number in range(10**6))
    of_set = [*islice((content for content in contents if digest_of_block(content)[0] == 0), 3)]
    first, second, third = map(digest_of_block, of_set)
    cache.put(first, of_set[0])
    cache.put(second, of_set[1])
    for seconds, digest in enumerate((first, second), start=1):
        os.utime(tmp_path / "00" / digest.hex(), (seconds, seconds))
    assert cache.find(first, verifies=True) is not None
    cache.put(third, of_set[2])
    assert [cache.holds(each) for each in (first, second, third)] == [True, False, True]


def test_a_disk_that_cannot_hold_blocks_costs_requests_only(objects, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert np.array_equal(open_array(objects, tmp_path / "file")[:], NUMBERS)
    assert "blocks cannot be cached" in caplog.text


def test_an_object_that_was_replaced_is_an_error_that_names_it(objects, tmp_path):
    objects.put("numbers", bytes(2000))
    with pytest.raises(ConfigError, match=rf"{objects.url}/numbers: bytes 64 to 128 are not what was put there"):
        open_array(objects, tmp_path)[32:64]
    assert not cached(tmp_path)


def test_a_server_that_is_gone_for_good_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("RANK", "3")
    objects = open_store("s3://bucket/x", timeout_seconds=0.5)
    with pytest.raises(ConfigError) as error:
        open_array(objects, tmp_path)[:10]
    assert str(error.value).startswith("rank 3 cannot read s3://bucket/x/numbers: ")
    assert str(error.value).endswith("rerun the same command to resume")
    assert len(str(error.value).splitlines()) == 1
