"""How a step becomes visible: all of it on disk first, then one rename; and what a kill in between leaves."""

import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.checkpoint.states import load, make_state, manager_of, progress_at, rank_of_a_group, save
from torchtitan_clone.checkpoint import commit
from torchtitan_clone.checkpoint.commit import check_digest, check_sizes, committed_steps
from torchtitan_clone.checkpoint.writer import (
    BLOCK,
    DIGEST,
    PIECE,
    FileRecord,
    digest_of_file,
    pieces_of,
    write_file,
)
from torchtitan_clone.testing.harness import run_ranks

REPOSITORY = Path(__file__).parents[2]


def save_and_record(folder):
    """A rank that saves; the calls that order what reaches the disk."""
    calls = []

    def recorded(name, function):
        def call(first, *others):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            calls.append((name, path.partition("step-1")[2].partition("/")[2] or path))
            return function(first, *others)

        return call

    for name in ("fsync", "rename"):
        setattr(os, name, recorded(name, getattr(os, name)))
    with rank_of_a_group():
        manager_of(folder, make_state(step=1)).save(progress_at(1), wait=True)
    return calls


def test_everything_is_on_disk_before_the_rename_and_the_rename_after_it(tmp_path):
    (calls,) = run_ranks(save_and_record, 1, tmp_path)
    *before, rename, after = calls
    names = [name for kind, name in before if kind == "fsync"]
    files = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert sorted(name for name in names if "/" not in name) == files
    assert names[-3] == "manifest.json"
    assert [".partial-" in name for name in names[-2:]] == [True, True]  # the folder itself
    assert rename[0] == "rename"
    assert ".partial-" in rename[1]
    assert after == ("fsync", str(tmp_path))


def test_a_save_that_fails_while_it_is_committed_is_none(tmp_path):
    no_text = os.fsdecode(b"\xff")  # as in a path, and not to be written as UTF-8
    (report,) = save(tmp_path, [1], config=no_text, writer_timeout_seconds=0.5)
    assert "can't encode" in report["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_step_that_is_saved_again_replaces_the_older_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:  # as on file systems without that call
        monkeypatch.setattr(commit.ctypes, "CDLL", lambda *_args, **_options: object())
    run = tmp_path / "run"
    run.mkdir()
    for config in ("first", "second"):
        save(tmp_path / config, [4], config=config)
        commit.commit(tmp_path / config / "step-4", run / "step-4")
        assert [path.name for path in run.iterdir()] == ["step-4"]
        assert (run / "step-4" / "config.toml").read_text() == config
        assert load(run).step == 4


def test_what_killed_processes_leave_is_brought_back_or_deleted(tmp_path):
    save(tmp_path, [1, 2, 3])
    (tmp_path / "step-3").rename(tmp_path / "step-3.replaced")  # killed between the two renames
    (tmp_path / "step-2").rename(tmp_path / "step-2.purged")
    save(tmp_path / "other", [4])
    (tmp_path / "other" / "step-4").rename(tmp_path / "step-4.partial-abc")  # whole, but not committed
    (tmp_path / "other").rmdir()
    assert load(tmp_path).step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


@pytest.mark.parametrize("folder", ["/dev/shm", ""])  # one cannot be written directly
@pytest.mark.parametrize("shift", [0, 1])
def test_files_of_every_length_are_written_directly_where_that_can_be(tmp_path, folder, shift):
    memory = mmap.mmap(-1, 2 * PIECE + 3 * BLOCK)
    memory[:] = os.urandom(len(memory))
    with tempfile.TemporaryDirectory(dir=folder or tmp_path) as place:
        for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PIECE, PIECE + 1, 2 * PIECE + BLOCK + 5):
            file, content = Path(place) / str(size), memoryview(memory)[shift : shift + size]
            beats = []
            record = write_file(file, pieces_of(content), direct=True, alive=lambda beats=beats: beats.append(0))
            assert file.read_bytes() == content
            assert record == FileRecord(bytes=size, digest=digest_of_file(file, name=DIGEST))
            assert len(beats) == -(-size // PIECE)


WITHOUT_XXHASH = """
import sys
sys.modules["xxhash"] = None
from pathlib import Path
from torchtitan_clone.checkpoint import commit
from torchtitan_clone.checkpoint.writer import write_file
folder = Path(sys.argv[1])
folder.mkdir()
files = {"progress.json": b'{"step": 7, "tokens_seen": 0, "skipped_steps": 0, "data": {}}', "x": b"numbers"}
commit.write_manifest(folder, step=7, files={name: write_file(folder / name, [text]) for name, text in files.items()})
assert commit.check_sizes(folder, step=7).algorithm == "blake2b"
commit.check_sizes(Path(sys.argv[2]))
"""


def test_without_the_library_of_digests_another_one_is_used(tmp_path):
    save(tmp_path, [1])
    command = [sys.executable, "-c", WITHOUT_XXHASH, tmp_path / "step-7", tmp_path / "step-1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert "was written with xxh3_128 digests: pip install xxhash" in done.stderr
    assert committed_steps(tmp_path) == [1, 7]
    manifest = check_sizes(tmp_path / "step-7", step=7)
    check_digest(tmp_path / "step-7", "x", manifest=manifest)
    (tmp_path / "step-7" / "x").write_bytes(b"numberz")
    with pytest.raises(commit.DamagedError, match="x has another digest"):
        check_digest(tmp_path / "step-7", "x", manifest=manifest)
