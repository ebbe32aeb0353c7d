"""Tests of writer.py and save.py with writer processes that die, hang or are stopped, and files that cannot grow."""

import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist

from tests.data.processes import is_alive
from tests.support.checkpoint_states import (
    build_manager,
    load,
    log_lines,
    make_state,
    progress_at,
    rank_of_a_group,
    set_step,
    started_writer,
)
from tests.support.harness import run_ranks, start_ranks
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.checkpoint.save import SaveReport

MODES = ("disabled", "async", "async_with_pinned_mem")
PROCESS = {"async_mode": MODES[2], "writer_timeout_seconds": 0.5}


def stop_every_new_writer(manager, first: int, until: threading.Event) -> None:
    """Stops each further writer process as soon as it has started."""
    seen = {first}
    while not until.is_set():
        pid = manager.writer_pid
        if pid is not None and pid not in seen:
            os.kill(pid, signal.SIGSTOP)
            seen.add(pid)
        time.sleep(0.0005)


def save_while(folder, harm) -> tuple[str, list[SaveReport]]:
    """Saves two steps, while something happens to the writer process; the log and the reports."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = build_manager(folder, state, **PROCESS)
        first = started_writer(manager)
        is_over = threading.Event()
        if harm == "killed between saves":
            os.kill(first, signal.SIGKILL)
        else:
            os.kill(first, signal.SIGSTOP)
        if harm == "stopped again and again":
            threading.Thread(target=stop_every_new_writer, args=(manager, first, is_over)).start()
        for step in (1, 2):
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            if harm == "killed in a save" and step == 1:
                time.sleep(0.1)
                os.kill(first, signal.SIGKILL)
            manager.finish()
        is_over.set()
        last = manager.writer_pid
        assert last != first
        manager.close()
        return "\n".join(lines), list(manager.reports())


@pytest.mark.parametrize(
    ("harm", "logged"),
    [
        ("killed between saves", ""),
        ("killed in a save", "died (exit code -9); attempt 1 of 2"),
        ("stopped", "made no progress for 0.5 s; attempt 1 of 2"),
        ("stopped again and again", "falling back to a writer thread"),
    ],
)
def test_no_save_is_lost_when_the_writer_process_fails(tmp_path, harm, logged):
    ((log, reports),) = run_ranks(save_while, 1, tmp_path, harm)
    assert [report.error for report in reports] == [None, None]
    assert logged in log
    assert committed_steps(tmp_path) == [1, 2]
    assert load(tmp_path).step == 2


def save_without_python(folder):
    """Saves two steps while the program of the writer process does not exist; the log and the errors."""
    lines = log_lines()
    with rank_of_a_group():
        manager = build_manager(folder, make_state(step=1), **PROCESS)
        sys.executable = str(folder / "missing")
        for step in (1, 2):
            manager.save(progress_at(step), wait=True)
        return "\n".join(lines), [report.error for report in manager.reports()]


def test_without_a_writer_process_a_thread_writes(tmp_path):
    ((log, errors),) = run_ranks(save_without_python, 1, tmp_path)
    assert errors == [None, None]
    assert log.count("the writer process cannot be started: [Errno 2] No such file") == 2
    assert log.count("falling back to a writer thread") == 1
    assert "a background thread failed" not in log
    assert committed_steps(tmp_path) == [1, 2]


def save_forever(folder, pid_file, options):
    """Saves step after step until it is killed; writes the id of its writer process to a file."""
    with rank_of_a_group():
        state = make_state(step=1)
        manager = build_manager(folder, state, **options)
        pid_file.write_text(str(started_writer(manager)))
        for step in range(1, 10_000):
            manager.wait_for_staging()
            manager.save(progress_at(step))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_writer_process_does_not_outlive_its_trainer(tmp_path, is_stopped):
    pid_file = tmp_path / "pid"
    (rank,) = start_ranks(save_forever, 1, tmp_path / "run", pid_file, PROCESS)
    deadline = time.monotonic() + 60
    while not committed_steps(tmp_path / "run"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer = int(pid_file.read_text())
    if is_stopped:
        os.kill(writer, signal.SIGSTOP)
    rank.process.kill()
    rank.process.join()
    deadline = time.monotonic() + 60
    while is_alive(writer):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    newest = committed_steps(tmp_path / "run")[-1]
    assert load(tmp_path / "run").progress.step == newest
    assert not list((tmp_path / "run").glob("*.partial-*"))


def save_with_limited_files(folder, mode):
    """Saves three steps; in the second one, files of the last rank cannot grow. The log and the errors."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = build_manager(folder, state, async_mode=mode)
        writer = started_writer(manager) if mode == PROCESS["async_mode"] else 0
        is_last = dist.get_rank() == dist.get_world_size() - 1
        for step in (1, 2, 3):
            limit = 1000 if step == 2 and is_last else resource.RLIM_INFINITY
            resource.prlimit(writer, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            manager.finish()
        return "\n".join(lines), [report.error for report in manager.reports()]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_disk_is_reported_and_fails_one_save_only(tmp_path, mode, world_size):
    (log, errors), *_ = run_ranks(save_with_limited_files, world_size, tmp_path, mode)
    last = world_size - 1
    assert errors[0] is errors[2] is None
    assert "File too large" in errors[1]
    assert f"rank-{last}.safetensors" in errors[1]
    assert f"step 2 could not be saved: rank {last}: File too large" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert load(tmp_path).step == 3
