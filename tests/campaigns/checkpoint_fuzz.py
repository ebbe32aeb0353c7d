"""Saves that are killed at random moments, and the resume afterwards; run by scripts/fuzz_checkpoint.py."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.harness import RankFailed, StartedRank, run_ranks, start_ranks
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.parallel.runtime import Launch, process_group

MODES = ("disabled", "async", "async_with_pinned_mem")
VICTIMS = ("a rank", "everything")
VICTIMS_WITH_WRITER = (*VICTIMS, "a writer", "stop a writer")
ROWS, COLUMNS, TENSORS = 257, 1024, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """The random choices of one run."""

    mode: str
    """checkpoint.async_mode."""
    victim: str
    ranks: int
    later_ranks: int
    """Ranks of the run that resumes."""
    seconds: float
    """Until the victim is killed."""
    again: bool
    """Whether every save is one of step 1, which replaces the save before."""

    @staticmethod
    def draw(source: random.Random, *, mode: str) -> "Case":
        """Draws a case."""
        return Case(
            mode=mode,
            victim=source.choice(VICTIMS_WITH_WRITER if mode == MODES[-1] else VICTIMS),
            ranks=source.randint(1, 3),
            later_ranks=source.randint(1, 3),
            seconds=source.uniform(0.0, 0.4),
            again=source.random() < 0.3,
        )


def run_case(case: Case, folder: Path) -> tuple[int, int | None, str | None]:
    """Runs one case; returns the last save that was reported, the save found, and what is wrong with it."""
    started = start_ranks(save_until_killed, case.ranks, folder, case.mode, case.again)
    wait_for(lambda: (folder / "reported").exists() or not any(rank.process.is_alive() for rank in started))
    time.sleep(case.seconds)
    kill_victim(case, started, folder)
    reported = max(map(int, (folder / "reported").read_text().split()), default=0)
    try:
        found = run_ranks(load_newest, case.later_ranks, folder, case.mode, timeout=60)
    except RankFailed as error:
        return reported, None, f"a rank of the run that resumes failed: {error}"
    numbers = {number for number in found if isinstance(number, int)}
    if len(numbers) != 1 or len(set(map(str, found))) != 1:
        return reported, None, f"values of {found}"
    (number,) = numbers
    return reported, number, f"save {number} is older than what was reported" if number < reported else None


def kill_victim(case: Case, started: list[StartedRank], folder: Path) -> None:
    """Kills the victim, lets the other processes run for a moment, and then kills them too; no process is left."""
    source = random.Random(str(case))
    processes = [rank.process for rank in started]
    writers = [int(pid) for path in folder.glob("writer-*") if (pid := path.read_text())]
    if case.victim == "a rank":
        source.choice(processes).kill()
    elif "writer" in case.victim and writers:
        signal_writer(source.choice(writers), signal.SIGKILL if case.victim == "a writer" else signal.SIGSTOP)
    if case.victim != "everything":
        time.sleep(source.uniform(0.0, 0.6))
    for process in processes:
        process.kill()
    for pid in writers if case.victim == "everything" else ():
        signal_writer(pid, signal.SIGKILL)
    for process in processes:
        process.join()
    for pid in writers:
        signal_writer(pid, signal.SIGCONT)


def signal_writer(pid: int, number: int) -> None:
    """Sends a signal to a writer process of ours, which may have ended."""
    try:
        if b"writer.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, number)
    except OSError:
        return


def make_state(step: int) -> dict[str, DTensor]:
    """Returns sharded tensors whose values are all `step`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((ROWS, COLUMNS), float(step))
    return {f"model/{i}": distribute_tensor(full, mesh, [Shard(0)]) for i in range(TENSORS)}


def build_manager(folder: Path, mode: str, state: dict[str, DTensor]) -> CheckpointManager:
    """Returns a manager that keeps two steps."""
    options = ("async_mode=" + mode, "keep_latest_k=2", "writer_timeout_seconds=0.3")
    checkpoint = load_config([f"--checkpoint.{option}" for option in options]).checkpoint
    return CheckpointManager(checkpoint, folder=folder / "checkpoint", state=lambda: dict(state), config="")


def save_until_killed(folder: Path, mode: str, again: bool) -> None:
    """Changes the state in place and saves it; with `again` the same step, and each save waits for the one before."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ranks that lose their peers complain
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        state = make_state(0)
        rank = dist.get_rank()
        manager = build_manager(folder, mode, state)
        manager.prepare()
        if rank == 0:
            (folder / "reported").touch()
        for number in range(1, 1_000_000):
            manager.wait_for_staging()
            for tensor in state.values():
                tensor.to_local().fill_(number)
            if manager.writer_pid:
                (folder / f"writer-{rank}").write_text(str(manager.writer_pid))
            progress = Progress(step=1 if again else number, tokens_seen=number, skipped_steps=0, data={})
            manager.save(progress, wait=again)
            for report in manager.reports():
                if report.error is None:
                    with (folder / "reported").open("a") as file:
                        file.write(f"{number if again else report.step}\n")


def load_newest(folder: Path, mode: str) -> int | str:
    """Resumes; returns the save that this rank's values are of, or what is wrong with them."""
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        state = make_state(-1)
        manager = build_manager(folder, mode, state)
        try:
            progress = manager.find_resume_point()
            manager.load()
        except Exception as error:  # noqa: BLE001, any error is a loss
            return f"{type(error).__name__}: {error}"
        values = {value for tensor in state.values() for value in tensor.to_local().unique().tolist()}
        bad = list((folder / "checkpoint").glob("*.bad-*"))
        expected = {-1.0} if progress is None else {float(progress.tokens_seen)}
        if bad or not values <= expected:
            return f"{bad or sorted(values)} instead of {expected}"
        return 0 if progress is None else progress.tokens_seen


def wait_for(holds: Callable[[], bool]) -> None:
    """Waits until `holds()`, for half a minute at most."""
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.002)
