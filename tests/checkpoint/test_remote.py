"""Steps in an object store: what commits, deletes and verifies them. Tests of remote.py, without a server."""

import json
import os
import re
import shutil
import sys
import time
from dataclasses import replace
from datetime import timedelta

import obstore
import pytest
import torch

from torchtitan_clone.checkpoint.folder import (
    MANIFEST_FILE,
    CorruptCheckpointError,
    Manifest,
    encode_manifest,
    open_file,
    read_manifest,
)
from torchtitan_clone.checkpoint.format import read_index
from torchtitan_clone.checkpoint.load import load_tensors, verify
from torchtitan_clone.checkpoint.offline import write_checkpoint
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.checkpoint.remote import (
    BLOCKS,
    LocalFile,
    Pace,
    RemoteFolder,
    as_local,
    block_bytes,
    check_store,
    open_remote,
)
from torchtitan_clone.checkpoint.writer import FileRecord, digest_of
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import MAX_BYTES, open_regular
from torchtitan_clone.storage.objects import REQUEST_BYTES, ObjectStore

SHAPES = {"model/wide": (700, 300), "model/tall": (9000, 40), "model/empty": (0, 3), "optimizer/step": ()}


def values(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Returns folders of committed local steps by their numbers."""
    folders = {}
    for step in (10, 20, 30, 40):
        folders[step] = tmp_path_factory.mktemp("local") / f"step-{step}"
        state = values(step)
        progress = Progress(step=step, tokens_seen=step, skipped_steps=0, data={})
        write_checkpoint(
            folders[step], meta=state, read=state.__getitem__, extra_files={"config.toml": ""}, progress=progress
        )
    return folders


@pytest.fixture
def remote(tmp_path):
    """Returns an empty store in a folder of the disk, whose files tests can damage."""
    (tmp_path / "store").mkdir()
    backend = obstore.store.LocalStore(tmp_path / "store")
    return RemoteFolder(ObjectStore(backend, url="s3://bucket", timeout_seconds=1))


def upload_files(remote, folder, *, manifest=None):
    """Uploads all files of a step; returns the manifest that commits it."""
    manifest = manifest or read_manifest(folder)
    files = dict(manifest.files)
    for name, record in manifest.files.items():
        with open_regular(folder / name) as file:
            each = LocalFile(name=name, record=record, file=file, algorithm=manifest.algorithm)
            files |= remote.upload(manifest.step, each, pace=Pace(None))
    return Manifest(step=manifest.step, algorithm=manifest.algorithm, files=files)


def commit_all(remote, steps, *numbers):
    for number in numbers:
        assert remote.commit(upload_files(remote, steps[number]))


def object_of(tmp_path, step, name):
    found = (tmp_path / "store" / f"step-{step}").iterdir()
    (path,) = (path for path in found if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{32}}", path.name))
    return path


def load_all(step):
    """Returns the tensors of a step that was verified."""
    index = verify(step, step=None, digests=True)
    state = {name: saved.empty() for name, saved in index.items()}
    load_tensors(step, state, index=index)
    return state


def test_a_step_is_committed_by_its_manifest_and_reads_back(remote, steps):
    manifest = upload_files(remote, steps[20])
    assert (remote.committed_steps(), remote.newest_complete_step()) == ([], None)
    assert remote.commit(manifest)
    assert remote.committed_steps() == [20]
    state = load_all(remote.step(20))
    assert state.keys() == SHAPES.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in values(20).items())
    assert as_local(remote.step(20).manifest) == read_manifest(steps[20])


def test_of_two_writers_of_a_step_the_first_one_wins(remote, steps, tmp_path):
    other = tmp_path / "step-20"
    state = values(99)
    progress = Progress(step=20, tokens_seen=99, skipped_steps=0, data={})
    write_checkpoint(other, meta=state, read=state.__getitem__, extra_files={"config.toml": ""}, progress=progress)
    first, second = upload_files(remote, steps[20]), upload_files(remote, other)
    assert remote.commit(first)
    assert not remote.commit(second)
    assert remote.commit(first), "an answer that was lost is not another writer"
    assert torch.equal(load_all(remote.step(20))["model/wide"], values(20)["model/wide"])


def test_a_step_with_a_missing_file_cannot_be_committed(remote, steps, tmp_path):
    manifest = upload_files(remote, steps[20])
    object_of(tmp_path, 20, "index.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"index\.json.* is missing"):
        remote.commit(manifest)
    assert remote.committed_steps() == []


def test_a_local_file_that_changed_is_not_uploaded(remote, steps, tmp_path):
    damaged = shutil.copytree(steps[20], tmp_path / "step-20")
    flip_a_bit(damaged / "rank-0.safetensors")
    with pytest.raises(OSError, match=r"local copy of rank-0\.safetensors is not what was written"):
        upload_files(remote, damaged)
    assert not list((tmp_path / "store").glob("*/rank-0*")), "no object appears"


def test_a_file_that_is_there_is_not_put_again(remote, steps, tmp_path):
    first = upload_files(remote, steps[20])
    path = object_of(tmp_path, 20, "rank-0.safetensors")
    before = path.stat().st_mtime_ns
    assert upload_files(remote, steps[20]) == first
    assert path.stat().st_mtime_ns == before


def test_a_step_that_was_corrupted_and_is_trained_again_is_put_again(remote, steps, tmp_path):
    """Its files have the names and the sizes of the damaged ones."""
    commit_all(remote, steps, 20)
    flip_a_bit(object_of(tmp_path, 20, "rank-0.safetensors"))
    remote.set_aside(20, suffix="bad", reason="damaged")
    commit_all(remote, steps, 20)
    assert torch.equal(load_all(remote.step(20))["model/wide"], values(20)["model/wide"])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_block_is_found_while_it_is_read(remote, steps, tmp_path):
    commit_all(remote, steps, 20)
    flip_a_bit(object_of(tmp_path, 20, "rank-0.safetensors"))
    step = remote.step(20)
    index = read_index(step)
    middle = {name: saved.empty() for name, saved in index.items()}
    with pytest.raises(CorruptCheckpointError, match="does not match the digest of its block"):
        load_tensors(step, middle, index=index)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "index.json", "progress.json", f"rank-0.safetensors{BLOCKS}"])
def test_the_newest_complete_step_has_all_its_objects(remote, steps, tmp_path, name):
    commit_all(remote, steps, 10, 20)
    path = object_of(tmp_path, 20, name)
    os.truncate(path, path.stat().st_size - 1)
    assert remote.newest_complete_step().name == "step-10"
    with pytest.raises(CorruptCheckpointError, match="bytes instead of"):
        verify(remote.step(20), step=20, digests=True)


def test_a_manifest_of_another_step_is_corrupted(remote, steps, tmp_path):
    commit_all(remote, steps, 10, 20)
    shutil.copy(tmp_path / "store/step-10" / MANIFEST_FILE, tmp_path / "store/step-20" / MANIFEST_FILE)
    assert remote.newest_complete_step().name == "step-10"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"bytes": 0, "digests": []}, "must be"),
        ({"bytes": 1 << 16, "digests": ["0"]}, "one digest for each 65536 bytes"),
        ({"bytes": 1 << 16, "digests": [[[]]]}, "must be"),
        ({"digests": []}, "bytes"),
        ({"bytes": 1 << 40, "digests": ["0"]}, "must be"),
    ],
)
def test_forged_digests_of_blocks_are_refused(remote, steps, tmp_path, content, why):
    """With a manifest whose own digest matches."""
    manifest = upload_files(remote, steps[20])
    forged = tmp_path / f"rank-0.safetensors{BLOCKS}"
    forged.write_text(json.dumps(content))
    fake = upload_files(remote, tmp_path, manifest=manifest_of(forged, manifest))
    remote.commit(Manifest(step=20, algorithm=manifest.algorithm, files=manifest.files | fake.files))
    with pytest.raises(CorruptCheckpointError, match=why):
        load_all(remote.step(20))


def manifest_of(path, manifest):
    with open_regular(path) as file:
        record = FileRecord(bytes=path.stat().st_size, digest=digest_of(file, name=manifest.algorithm))
    return Manifest(step=manifest.step, algorithm=manifest.algorithm, files={path.name: record})


def test_retention_keeps_the_newest_and_the_permanent_steps(remote, steps):
    commit_all(remote, steps, 10, 20, 30, 40)
    assert remote.purge(keep_latest_k=1, keep_every=20) == [10, 30]
    assert remote.committed_steps() == [20, 40]
    assert {each.name.split("/")[0] for each in remote.objects.find()} == {"step-20", "step-40"}
    assert remote.purge(keep_latest_k=1, keep_every=0, keep_below=40) == []


def test_a_damaged_step_is_neither_counted_nor_deleted(remote, steps, tmp_path):
    commit_all(remote, steps, 10, 20, 30)
    object_of(tmp_path, 30, "index.json").unlink()
    assert remote.purge(keep_latest_k=1, keep_every=0) == [10]
    assert remote.committed_steps() == [20, 30]


def test_a_deletion_that_was_killed_leaves_no_step_and_its_garbage_is_collected_when_it_is_old(remote, steps, tmp_path):
    commit_all(remote, steps, 10, 20)
    upload_files(remote, steps[40])  # in progress
    (tmp_path / "store/step-10" / MANIFEST_FILE).unlink()
    assert remote.committed_steps() == [20]
    remote.purge(keep_latest_k=2, keep_every=0)
    garbage = {each.name.split("/")[0] for each in remote.objects.find()}
    assert garbage == {"step-10", "step-20", "step-40"}, "it may be an upload"
    now = max(each.modified for each in remote.objects.find())
    for path in (tmp_path / "store/step-10").iterdir():
        os.utime(path, times=((now - timedelta(hours=25)).timestamp(),) * 2)
    remote.purge(keep_latest_k=2, keep_every=0)
    assert {each.name.split("/")[0] for each in remote.objects.find()} == {"step-20", "step-40"}
    assert remote.commit(upload_files(remote, steps[40]))


def test_an_upload_may_reuse_what_a_killed_one_left_long_ago(remote, steps, tmp_path):
    """Between its requests, another rank commits the step before and collects garbage."""
    commit_all(remote, steps, 10)
    upload_files(remote, steps[30])
    for path in (tmp_path / "store/step-30").iterdir():
        os.utime(path, times=(0, 0))
    manifest = upload_files(remote, steps[30])
    assert object_of(tmp_path, 30, "rank-0.safetensors").stat().st_mtime == 0, "it is reused"
    commit_all(remote, steps, 20)
    remote.purge(keep_latest_k=2, keep_every=0)
    assert remote.commit(manifest)


def test_a_step_that_is_set_aside_no_longer_counts_and_its_files_are_kept(remote, steps, tmp_path):
    commit_all(remote, steps, 10, 20)
    target = remote.set_aside(20, suffix="bad", reason="a reason: x/y")
    assert target == "s3://bucket/step-20/manifest.json.bad-a-reason-x-y"
    assert (remote.committed_steps(), remote.has_corrupt_steps()) == ([10], True)
    for path in (tmp_path / "store/step-20").iterdir():
        os.utime(path, times=(0, 0))
    remote.purge(keep_latest_k=1, keep_every=0)
    assert object_of(tmp_path, 20, "rank-0.safetensors").exists()
    commit_all(remote, steps, 20)
    assert remote.committed_steps() == [10, 20]


def test_a_manifest_that_is_too_large_is_set_aside(remote):
    remote.objects.put(f"step-20/{MANIFEST_FILE}", b"[" * (MAX_BYTES + 1))
    with pytest.raises(CorruptCheckpointError, match="bytes, which are accepted"):
        verify(remote.step(20), step=20, digests=True)
    remote.set_aside(20, suffix="bad", reason="large")
    assert (remote.committed_steps(), remote.has_corrupt_steps()) == ([], True)


def test_a_large_document_is_read_in_pieces(remote, steps, tmp_path):
    """What a store says a file is must fit into memory."""
    large = tmp_path / "notes.txt"
    large.write_bytes(bytes(3 * REQUEST_BYTES))
    manifest = upload_files(remote, steps[20])
    fake = upload_files(remote, tmp_path, manifest=manifest_of(large, manifest))
    remote.commit(Manifest(step=20, algorithm=manifest.algorithm, files=manifest.files | fake.files))
    before = remote.objects.bytes_read
    with open_file(remote.step(20), large.name) as file:
        assert file.read(10) == bytes(10)
    assert remote.objects.bytes_read - before < 2 * REQUEST_BYTES


def test_a_start_checks_the_store_once(steps, tmp_path):
    runs = Checkpoint(folder="memory://checked/runs")
    assert check_store(runs, writes=True) is None
    commit_all(open_remote("memory://checked/runs", timeout_seconds=1), steps, 10)
    progress = check_store(runs, writes=False)
    assert progress is not None
    assert progress.step == 10
    assert check_store(Checkpoint(folder="memory://checked/other"), writes=False) is None
    progress = Progress(step=11, tokens_seen=11, skipped_steps=0, data={"samples": 3})
    state = values(11)
    folder = tmp_path / "step-11"
    write_checkpoint(folder, meta=state, read=state.__getitem__, extra_files={"config.toml": ""}, progress=progress)
    commit_all(open_remote(runs.folder, timeout_seconds=1), {11: folder}, 11)
    assert check_store(runs, writes=False) == progress
    without = check_store(replace(runs, exclude_from_loading=["data"]), writes=False)
    assert without == replace(progress, data={}), "the run reads other data, which is no error"


def test_names_of_other_objects_are_not_steps(remote, steps):
    commit_all(remote, steps, 10)
    for name in ("step-010/manifest.json", "step--1/manifest.json", "step-5", "other/step-7/manifest.json"):
        remote.objects.put(name, encode_manifest(read_manifest(steps[10])))
    assert remote.committed_steps() == [10]


def test_a_pace_limits_bytes_per_second():
    pace, start = Pace(1.0), time.monotonic()
    for _ in range(3):
        pace.wait(1 << 18)
    assert time.monotonic() - start >= 0.5, "two quarters of a MiB went before"


@pytest.mark.parametrize(("size", "block"), [(0, 1 << 16), (1 << 31, 1 << 17), (12 << 30, 1 << 19), (1 << 50, 8 << 20)])
def test_blocks_are_small_beside_their_file(size, block):
    assert block_bytes(size) == block


def test_a_missing_package_is_one_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r'need the package obstore; pip install "obstore>='):
        check_store(Checkpoint(folder="s3://bucket/runs"), writes=False)
