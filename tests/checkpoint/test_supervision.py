"""Writers that die, hang or are stopped, trainers that are killed, disks that are full, saves that overlap."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint.states import (
    load,
    load_all,
    log_lines,
    make_state,
    manager_of,
    progress_at,
    rank_of_a_group,
    save,
    set_step,
)
from tests.harness import run_ranks, start_ranks
from torchtitan_clone.checkpoint.commit import committed_steps
from torchtitan_clone.checkpoint.manager import _lack_of_space

PROCESS = {"async_mode": "async_with_pinned_mem", "writer_timeout_seconds": 0.5}


def started_writer(manager) -> int:
    """Process id of the writer, which is started beside the training."""
    manager.prepare()
    deadline = time.monotonic() + 10
    while manager.writer_pid is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return manager.writer_pid


def stop_every_new_writer(manager, first: int, until: threading.Event) -> None:
    """Stops each writer as soon as it is there."""
    seen = {first}
    while not until.is_set():
        pid = manager.writer_pid
        if pid is not None and pid not in seen:
            os.kill(pid, signal.SIGSTOP)
            seen.add(pid)
        time.sleep(0.0005)


def save_while(folder, harm) -> tuple[str, list[dict]]:
    """A rank that saves two steps, while something happens to its writer; its log and reports."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = manager_of(folder, state, **PROCESS)
        first, over = started_writer(manager), threading.Event()
        if harm == "killed between saves":
            os.kill(first, signal.SIGKILL)
        else:
            os.kill(first, signal.SIGSTOP)
        if harm == "stopped again and again":
            threading.Thread(target=stop_every_new_writer, args=(manager, first, over)).start()
        for step in (1, 2):
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            if harm == "killed in a save" and step == 1:
                time.sleep(0.1)
                os.kill(first, signal.SIGKILL)
            manager.finish()
        over.set()
        last = manager.writer_pid
        assert last != first
        manager.close()
        return "\n".join(lines), [vars(report) for report in manager.reports()]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("killed between saves", ""),
        ("killed in a save", "died (exit code -9); attempt 1 of 2"),
        ("stopped", "made no progress for 0.5 s; attempt 1 of 2"),
        ("stopped again and again", "from now on a thread writes"),
    ],
)
def test_a_writer_that_fails_costs_no_save(tmp_path, harm, told):
    ((log, reports),) = run_ranks(save_while, 1, tmp_path, harm)
    assert [report["error"] for report in reports] == [None, None]
    assert told in log
    assert committed_steps(tmp_path) == [1, 2]
    assert load(tmp_path).step == 2


def save_and_tell(folder, told, options):
    """A rank that saves step after step until it is killed; it tells its writer's process id."""
    with rank_of_a_group():
        state = make_state(step=1)
        manager = manager_of(folder, state, **options)
        told.write_text(str(started_writer(manager)))
        for step in range(1, 10_000):
            manager.wait_for_staging()
            manager.save(progress_at(step))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet asked for its exit code does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_writer_does_not_outlive_its_trainer(tmp_path):
    told = tmp_path / "pid"
    ((process, _),) = start_ranks(save_and_tell, 1, tmp_path / "run", told, PROCESS)
    deadline = time.monotonic() + 30
    while not committed_steps(tmp_path / "run"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    writer = int(told.read_text())
    deadline = time.monotonic() + 3
    while is_alive(writer):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    newest = committed_steps(tmp_path / "run")[-1]
    assert load(tmp_path / "run").progress.step == newest
    assert not list((tmp_path / "run").glob("*.partial-*"))


def save_on_a_full_disk(folder, mode):
    """A rank whose files cannot grow beyond a limit in its second save; log and reports."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = manager_of(folder, state, async_mode=mode)
        writer = started_writer(manager) if mode == PROCESS["async_mode"] else 0
        for step in (1, 2, 3):
            limit = 1000 if step == 2 else resource.RLIM_INFINITY
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            manager.finish()
        return "\n".join(lines), [report.error for report in manager.reports()]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_full_disk_is_told_and_costs_that_save_only(tmp_path, mode):
    ((log, errors),) = run_ranks(save_on_a_full_disk, 1, tmp_path, mode)
    assert errors[0] is errors[2] is None
    assert "File too large" in errors[1]
    assert "rank-0.safetensors" in errors[1]
    assert "step 2 could not be saved: rank 0: File too large" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert load(tmp_path).step == 3


def save_with_little_memory(folder):
    """A rank that has no memory for a copy; its log."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        manager = manager_of(folder, state, **PROCESS)
        manager.prepare()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        manager.save(progress_at(1), wait=True)
        return "\n".join(lines)


def test_without_memory_for_a_copy_the_training_waits(tmp_path):
    (log,) = run_ranks(save_with_little_memory, 1, tmp_path)
    assert "of memory for staging" in log
    assert load(tmp_path).step == 1


def test_a_save_that_cannot_fit_is_not_begun(tmp_path):
    assert _lack_of_space(tmp_path / "not" / "yet" / "there", size=1000) is None
    assert "it needs 931322574.62 GiB" in (_lack_of_space(tmp_path, size=10**18) or "")


def save_overlapping(folder, options):
    """A rank that trains on at once after each save; the log."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=0)
        manager = manager_of(folder, state, **options)
        for step in range(1, 40):
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
        manager.save(progress_at(39), wait=True)
        manager.close()
        return "\n".join(lines)


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_saves_that_overlap_hold_the_values_of_their_own_step(tmp_path, mode):
    log = run_ranks(save_overlapping, 2, tmp_path, {"async_mode": mode, "keep_latest_k": 0})[0]
    steps = committed_steps(tmp_path)
    assert steps[-1] == 39
    if len(steps) < 39:
        assert "could not be saved: the save before it is still in flight" in log
    sources = [tmp_path / "one" / str(step) for step in steps]
    for step, source in zip(steps, sources, strict=True):
        source.mkdir(parents=True)
        (tmp_path / f"step-{step}").rename(source / f"step-{step}")
    assert [found.step for found in load_all(sources, world_size=2)] == steps


def test_a_step_that_is_saved_again_replaces_the_older_one(tmp_path):
    save(tmp_path, [4], config="first")
    save(tmp_path, [4], config="second")
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert (tmp_path / "step-4" / "config.toml").read_text() == "second"
