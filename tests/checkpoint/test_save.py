"""Saves overlap with training or with each other, and disks are full."""

import errno
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
import torch

from tests.support.checkpoint_states import (
    SlowState,
    build_manager,
    load,
    load_all,
    log_lines,
    make_state,
    progress_at,
    rank_of_a_group,
    set_step,
    started_writer,
)
from tests.support.harness import run_ranks
from torchtitan_clone.checkpoint.folder import committed_steps

ASYNC_MODES = ("async", "async_with_pinned_mem")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of half a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def save_while_the_disk_fills(folder, mode):
    """Saves three steps; the disk fills up after the second has found enough space. Returns the log and the errors."""
    lines = log_lines()
    with rank_of_a_group():
        state = SlowState({"model/x": torch.ones(40_000)}, seconds=0.3)  # 160 kB
        manager = build_manager(folder, state, async_mode=mode)
        filler = folder / "filler"
        for step in (1, 2, 3):
            manager.wait_for_staging()
            if step == 2 and mode == "disabled":  # space for the tensors, but not for the other files
                filler.write_bytes(bytes(shutil.disk_usage(folder).free - 172_032))
            manager.save(progress_at(step))
            if step == 2 and mode != "disabled":
                filler.write_bytes(bytes(shutil.disk_usage(folder).free - 8_192))
            manager.finish()
            filler.unlink(missing_ok=True)
        return "\n".join(lines), [report.error for report in manager.reports()]


@pytest.mark.parametrize("mode", ["disabled", *ASYNC_MODES])
def test_a_full_disk_is_reported_and_fails_one_save_only(small_disk, mode):
    ((log, errors),) = run_ranks(save_while_the_disk_fills, 1, small_disk, mode)
    assert errors[0] is errors[2] is None, log
    assert "No space left on device" in errors[1]
    assert "step 2 could not be saved" in log
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-1", "step-3"]


def save_too_much(folder):
    """Saves a state larger than any disk: one element, expanded. The log."""
    lines = log_lines()
    with rank_of_a_group():
        manager = build_manager(folder, {"model/x": torch.ones(1).expand(10**15)})
        manager.save(progress_at(1), wait=True)
        return "\n".join(lines)


def test_a_save_that_does_not_fit_is_not_started(tmp_path):
    (log,) = run_ranks(save_too_much, 1, tmp_path / "not" / "yet" / "there")
    assert f"step 1 could not be saved: it needs 3725290.30 GiB, and {tmp_path} has" in log
    assert not list(tmp_path.iterdir())


def save_on_a_disk_with_errors(folder):
    """Saves three steps; in the second one, rank 1 cannot ask for the free space. The log and the errors."""
    lines = log_lines()
    disk_usage = shutil.disk_usage

    def fail(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with rank_of_a_group():
        manager = build_manager(folder, make_state(step=1))
        for step in (1, 2, 3):
            shutil.disk_usage = fail if (step, os.environ["RANK"]) == (2, "1") else disk_usage
            manager.save(progress_at(step), wait=True)
        return "\n".join(lines), [report.error for report in manager.reports()]


def test_a_disk_that_one_rank_cannot_ask_fails_one_save_only(tmp_path):
    (log, errors), _ = run_ranks(save_on_a_disk_with_errors, 2, tmp_path)
    assert f"step 2 could not be saved: Stale file handle: {tmp_path}; training continues" in log
    assert errors == [None, None]
    assert committed_steps(tmp_path) == [1, 3]


def save_overlapping(folder, options):
    """Saves 39 steps and changes the state as soon as it may. The log."""
    lines = log_lines()
    with rank_of_a_group():
        state = SlowState(make_state(step=0), seconds=0.01)
        manager = build_manager(folder, state, **options)
        for step in range(1, 40):
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            time.sleep(0.005)
        manager.save(progress_at(39), wait=True)
        manager.close()
        return "\n".join(lines)


@pytest.mark.parametrize("mode", ASYNC_MODES)
def test_saves_that_overlap_hold_the_values_of_their_own_step(tmp_path, mode):
    log = run_ranks(save_overlapping, 2, tmp_path, {"async_mode": mode, "keep_latest_k": 0})[0]
    steps = committed_steps(tmp_path)
    assert steps[-1] == 39
    skipped = log.count("could not be saved: the previous save is still in progress")
    assert skipped in (39 - len(steps), 40 - len(steps))  # step 39 may have been skipped at first
    sources = [tmp_path / "one" / str(step) for step in steps]
    for step, source in zip(steps, sources, strict=True):
        source.mkdir(parents=True)
        (tmp_path / f"step-{step}").rename(source / f"step-{step}")
    assert [found.step for found in load_all(sources, world_size=2)] == steps


def save_during_a_save(folder):
    """Stops the writer process in the first of three saves; the committed steps after each, and the log."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = build_manager(folder, state, async_mode=ASYNC_MODES[1], keep_every=3)
        writer = started_writer(manager)
        os.kill(writer, signal.SIGSTOP)
        found = []
        for step in (1, 2, 3):
            if step == 3:  # a permanent step: it waits
                threading.Timer(0.3, os.kill, (writer, signal.SIGCONT)).start()
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            found.append(committed_steps(folder))
        return found, "\n".join(lines)


def test_one_save_runs_at_a_time_and_others_are_skipped_or_wait(tmp_path):
    ((found, log),) = run_ranks(save_during_a_save, 1, tmp_path)
    assert found == [[], [], [1, 3]]
    assert "step 2 could not be saved: the previous save is still in progress" in log
    assert load(tmp_path).step == 3
    shutil.rmtree(tmp_path / "step-3")
    assert load(tmp_path).step == 1


def save_on_two_nodes(folder):
    """Saves a step on ranks that have a folder each, as on nodes that do not share it; the errors of rank 0."""
    with rank_of_a_group():
        manager = build_manager(folder / f"node-{os.environ['RANK']}", make_state(step=1))
        manager.save(progress_at(1), wait=True)
        return [report.error for report in manager.reports()]


def test_a_save_into_a_folder_that_is_not_shared_fails(tmp_path):
    for node in ("node-0", "node-1"):
        (tmp_path / node).mkdir()
    ((error,), _) = run_ranks(save_on_two_nodes, 2, tmp_path)
    assert "rank 0 does not find rank-1.safetensors in" in error
    assert "all nodes must share job.dump_folder" in error
    assert [list(node.iterdir()) for node in tmp_path.iterdir()] == [[], []]
