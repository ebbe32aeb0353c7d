"""Writers that die, hang or are stopped, trainers that are killed, disks that are full, saves that overlap."""

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.states import (
    load,
    load_all,
    log_lines,
    make_state,
    manager_of,
    progress_at,
    rank_of_a_group,
    set_step,
)
from torchtitan_clone.checkpoint.commit import committed_steps
from torchtitan_clone.checkpoint.loading import read_tensors
from torchtitan_clone.checkpoint.staging import StagingBuffer
from torchtitan_clone.testing.harness import run_ranks, start_ranks
from torchtitan_clone.testing.runs import options, train_rank

ASYNC = ("async", "async_with_pinned_mem")
MODES = ("disabled", *ASYNC)
PROCESS = {"async_mode": ASYNC[1], "writer_timeout_seconds": 0.5}


def slow_copies(seconds: float) -> None:
    """From now on each copy of the state takes that much longer in this process."""
    stage = StagingBuffer.stage

    def slowly(self, state):
        time.sleep(seconds)
        stage(self, state)

    StagingBuffer.stage = slowly


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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_writer_does_not_outlive_its_trainer(tmp_path, is_stopped):
    told = tmp_path / "pid"
    (rank,) = start_ranks(save_and_tell, 1, tmp_path / "run", told, PROCESS)
    deadline = time.monotonic() + 30
    while not committed_steps(tmp_path / "run"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer = int(told.read_text())
    if is_stopped:
        os.kill(writer, signal.SIGSTOP)
    rank.process.kill()
    rank.process.join()
    deadline = time.monotonic() + 3
    while is_alive(writer):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    newest = committed_steps(tmp_path / "run")[-1]
    assert load(tmp_path / "run").progress.step == newest
    assert not list((tmp_path / "run").glob("*.partial-*"))


def save_with_limited_files(folder, mode):
    """A last rank whose files cannot grow beyond a limit in its second save; log and reports."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = manager_of(folder, state, async_mode=mode)
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
def test_what_the_disk_says_is_told_and_costs_that_save_only(tmp_path, mode, world_size):
    (log, errors), *_ = run_ranks(save_with_limited_files, world_size, tmp_path, mode)
    last = world_size - 1
    assert errors[0] is errors[2] is None
    assert "File too large" in errors[1]
    assert f"rank-{last}.safetensors" in errors[1]
    assert f"step 2 could not be saved: rank {last}: File too large" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert load(tmp_path).step == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def save_while_the_disk_fills(folder, mode):
    """A rank whose disk becomes full when its second save has found that there is room; log and reports."""
    slow_copies(0.3)
    lines = log_lines()
    with rank_of_a_group():
        state = {"model/x": torch.ones(40_000)}  # 160 kB
        manager = manager_of(folder, state, async_mode=mode)
        filler = folder / "filler"
        for step in (1, 2, 3):
            manager.wait_for_staging()
            if step == 2 and mode == "disabled":  # room for the tensors, but not for what comes with them
                filler.write_bytes(bytes(shutil.disk_usage(folder).free - 172_032))
            manager.save(progress_at(step))
            if step == 2 and mode != "disabled":
                filler.write_bytes(bytes(shutil.disk_usage(folder).free - 8_192))
            manager.finish()
            filler.unlink(missing_ok=True)
        return "\n".join(lines), [report.error for report in manager.reports()]


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_is_full_is_told_as_such(small_disk, mode):
    ((log, errors),) = run_ranks(save_while_the_disk_fills, 1, small_disk, mode)
    assert errors[0] is errors[2] is None, log
    assert "No space left on device" in errors[1]
    assert "step 2 could not be saved" in log
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-1", "step-3"]


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


def save_too_much(folder):
    """A rank whose state is larger than any disk: one number that claims to be very many; its log."""
    lines = log_lines()
    with rank_of_a_group():
        manager = manager_of(folder, {"model/x": torch.ones(1).expand(10**15)})
        manager.save(progress_at(1), wait=True)
        return "\n".join(lines)


def test_a_save_that_cannot_fit_is_not_begun(tmp_path):
    (log,) = run_ranks(save_too_much, 1, tmp_path / "not" / "yet" / "there")
    assert f"step 1 could not be saved: it needs 3725290.30 GiB, and {tmp_path} has" in log
    assert not list(tmp_path.iterdir())


def save_overlapping(folder, options):
    """A rank that changes its state at once when it may; the log."""
    slow_copies(0.01)
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=0)
        manager = manager_of(folder, state, **options)
        for step in range(1, 40):
            manager.wait_for_staging()
            set_step(state, step=step)
            manager.save(progress_at(step))
            time.sleep(0.005)
        manager.save(progress_at(39), wait=True)
        manager.close()
        return "\n".join(lines)


@pytest.mark.parametrize("mode", ASYNC)
def test_saves_that_overlap_hold_the_values_of_their_own_step(tmp_path, mode):
    log = run_ranks(save_overlapping, 2, tmp_path, {"async_mode": mode, "keep_latest_k": 0})[0]
    steps = committed_steps(tmp_path)
    assert steps[-1] == 39
    left_out = log.count("could not be saved: the save before it is still in flight")
    assert left_out in (39 - len(steps), 40 - len(steps))  # the last one may have been left out first
    sources = [tmp_path / "one" / str(step) for step in steps]
    for step, source in zip(steps, sources, strict=True):
        source.mkdir(parents=True)
        (tmp_path / f"step-{step}").rename(source / f"step-{step}")
    assert [found.step for found in load_all(sources, world_size=2)] == steps


def save_during_a_save(folder):
    """A rank whose writer stands still in the first of three saves; the steps that are there after each, the log."""
    lines = log_lines()
    with rank_of_a_group():
        state = make_state(step=1)
        manager = manager_of(folder, state, async_mode=PROCESS["async_mode"], keep_every=3)
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


def test_one_save_at_a_time_others_are_left_out_or_wait(tmp_path):
    ((found, log),) = run_ranks(save_during_a_save, 1, tmp_path)
    assert found == [[], [], [1, 3]]
    assert "step 2 could not be saved: the save before it is still in flight" in log
    assert load(tmp_path).step == 3
    shutil.rmtree(tmp_path / "step-3")
    assert load(tmp_path).step == 1


def train_with_slow_copies(argv, logs):
    """A rank that trains; a weight, whole, as it is after every step."""
    from torchtitan_clone import trainer

    slow_copies(0.5)  # longer than a step, also on a busy machine
    count, seen = trainer.Trainer._count_step, {}

    def counted(self, step, **others):
        count(self, step, **others)
        seen[step] = self.parameters["output.weight"].detach().full_tensor().clone()

    trainer.Trainer._count_step = counted
    assert train_rank(argv, logs) == 0
    return seen


@pytest.mark.parametrize("mode", ASYNC)
def test_the_trainer_changes_no_weight_before_it_is_copied(corpus, tmp_path, mode):
    changes = {"checkpoint__async_mode": mode, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 0}
    argv = options(corpus, tmp_path, training__steps=5, **changes)
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    seen, _ = run_ranks(train_with_slow_copies, 2, argv, logs)
    folder = tmp_path / "run" / "checkpoint"
    steps = committed_steps(folder)
    assert len(steps) > 1
    for step in steps:
        (saved,) = read_tensors(folder / f"step-{step}", ["model/output.weight"]).values()
        assert torch.equal(saved, seen[step])
        assert step == 5 or not torch.equal(saved, seen[step + 1])
