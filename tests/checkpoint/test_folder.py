"""A step is flushed to disk completely, then renamed; a kill in between leaves no broken step."""

import ctypes
import os

import pytest

from tests.support.checkpoint_states import (
    build_manager,
    load,
    make_state,
    progress_at,
    rank_of_a_group,
    save,
)
from tests.support.harness import run_ranks
from torchtitan_clone.checkpoint.folder import commit, delete_leftovers, purge


def save_and_record(folder):
    """Saves, and records the calls that order what reaches the disk."""
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
        build_manager(folder, make_state(step=1)).save(progress_at(1), wait=True)
    return calls


def test_all_files_are_flushed_before_the_rename_and_it_after_them(tmp_path):
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


def test_a_save_that_fails_during_its_commit_leaves_nothing(tmp_path):
    not_utf8 = os.fsdecode(b"\xff")  # a path may contain it, a UTF-8 file may not
    (report,) = save(tmp_path, [1], config=not_utf8, writer_timeout_seconds=0.5)
    assert "can't encode" in report.error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_saving_a_step_again_replaces_the_older_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:  # as on file systems without RENAME_EXCHANGE
        monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_options: object())
    run = tmp_path / "run"
    run.mkdir()
    for config in ("first", "second"):
        save(tmp_path / config, [4], config=config)
        commit(tmp_path / config / "step-4", run / "step-4")
        assert [path.name for path in run.iterdir()] == ["step-4"]
        assert (run / "step-4" / "config.toml").read_text() == config
        assert load(run).step == 4


def test_leftovers_of_killed_processes_are_restored_or_deleted(tmp_path):
    save(tmp_path, [1, 2, 3])
    (tmp_path / "step-3").rename(tmp_path / "step-3.replaced")  # killed between the two renames
    (tmp_path / "step-2").rename(tmp_path / "step-2.purged")
    save(tmp_path / "other", [4])
    (tmp_path / "other" / "step-4").rename(tmp_path / "step-4.partial-abc")  # complete, but not committed
    (tmp_path / "other").rmdir()
    weights = tmp_path / "model_only"
    for name in ("step-3.replaced", "step-4.partial-abc"):
        (weights / name).mkdir(parents=True)
    assert load(tmp_path).step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model_only", "step-1", "step-3"]
    assert [path.name for path in weights.iterdir()] == ["step-3"]


def test_a_replica_group_deletes_its_own_leftovers(tmp_path):
    for name in ("partial-r1-abc", "partial-r11-abc", "partial-abc", "purged", "replaced"):
        (tmp_path / f"step-4.{name}").mkdir()
    delete_leftovers(tmp_path, group="r1")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-4.partial-abc", "step-4.partial-r11-abc", "step-4.replaced"]


def test_a_deletion_that_was_killed_does_not_stop_later_ones(tmp_path):
    save(tmp_path, [1, 2, 3])
    (tmp_path / "step-1.purged" / "left").mkdir(parents=True)
    assert purge(tmp_path, keep_latest_k=1, keep_every=0) == [1, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step")] == ["step-3"]
