"""Kills ranks and writers at random moments of their saves, and looks whether anything was lost.

    python scripts/fuzz_checkpoint.py --count=120 --seed=1

A run of 1 to 3 ranks saves step after step, in one of the three modes, while its state changes in place as an optimizer
changes it; all values of a step say which one it is. After a random time a rank, a writer, a writer by a stop signal,
or everything is killed, and then the rest. Afterwards a run of another number of ranks goes on from the folder:
- it finds a step, unless none was reported as committed;
- all values on all ranks are those of one save, whose number stands in progress.json;
- that is no older than the last save that was reported as committed.
In some runs every save is one of step 1, and replaces the one before.
The same seed gives the same choices, not the same moments. The exit code is 1 where anything was lost.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan_clone.checkpoint.commit import Progress
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.config.schema import Checkpoint, Comm
from torchtitan_clone.parallel.runtime import Launch, process_group

MODES = ("disabled", "async", "async_with_pinned_mem")
VICTIMS = ("a rank", "everything")
VICTIMS_WITH_WRITER = (*VICTIMS, "a writer", "stop a writer")
ROWS, COLUMNS, TENSORS = 257, 1024, 8
CONTEXT = multiprocessing.get_context("forkserver")


def main() -> int:
    """Runs, and tells; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="a line for every run")
    options = parser.parse_args()
    CONTEXT.set_forkserver_preload(["__main__", "torchtitan_clone.checkpoint.resume"])
    random_choice, failures, kinds = random.Random(options.seed), [], {}
    for number in range(options.count):
        mode = MODES[number % len(MODES)]
        case = {
            "mode": mode,
            "victim": random_choice.choice(VICTIMS_WITH_WRITER if mode == MODES[-1] else VICTIMS),
            "ranks": random_choice.randint(1, 3),
            "later_ranks": random_choice.randint(1, 3),
            "seconds": random_choice.uniform(0.0, 0.4),
            "again": random_choice.random() < 0.3,
        }
        with tempfile.TemporaryDirectory(prefix="fuzz_checkpoint_") as folder:
            reported, found, error = run_case(case, Path(folder))
        kinds[case["mode"], case["victim"]] = kinds.get((case["mode"], case["victim"]), 0) + 1
        if options.verbose or error:
            print(f"{number:4} {case}: reported {reported}, found {found}: {error or 'ok'}", flush=True)
        if error:
            failures.append(number)
    for (mode, victim), count in sorted(kinds.items()):
        print(f"{mode:<22} {victim:<14} {count:4} runs")
    print(f"{options.count} runs with seed {options.seed}, {len(failures)} with a loss: {failures}")
    return int(bool(failures))


def run_case(case: dict[str, Any], folder: Path) -> tuple[int, int | None, str | None]:
    """One run and its successor: the last save reported, the one found, and what is wrong with it."""
    processes, _ = start(case["ranks"], save_until_killed, folder, case["mode"], case["again"])
    wait_for(lambda: (folder / "reported").exists() or not any(p.is_alive() for p in processes))
    time.sleep(case["seconds"])
    kill(case, processes, folder)
    reported = max(map(int, (folder / "reported").read_text().split()), default=0)
    _, answers = start(case["later_ranks"], load_newest, folder, case["mode"])
    try:
        found = [answer.recv() if answer.poll(60) else "no answer" for answer in answers]
    except EOFError:
        return reported, None, "a later rank failed"
    numbers = {number for number in found if isinstance(number, int)}
    if len(numbers) != 1 or len(set(map(str, found))) != 1:
        return reported, None, f"values of {found}"
    (number,) = numbers
    return reported, number, f"save {number} is older than what was reported" if number < reported else None


def kill(case: dict[str, Any], processes: list[Any], folder: Path) -> None:
    """Kills the victim, lets the others go on for a moment, and then kills them too; no process is left."""
    choice = random.Random(str(case))
    writers = [int(pid) for path in folder.glob("writer-*") if (pid := path.read_text())]
    if case["victim"] == "a rank":
        choice.choice(processes).kill()
    elif "writer" in case["victim"] and writers:
        signal_process(choice.choice(writers), signal.SIGKILL if case["victim"] == "a writer" else signal.SIGSTOP)
    if case["victim"] != "everything":
        time.sleep(choice.uniform(0.0, 0.6))
    for process in processes:
        process.kill()
    for pid in writers if case["victim"] == "everything" else ():
        signal_process(pid, signal.SIGKILL)
    for process in processes:
        process.join()
    for pid in writers:
        signal_process(pid, signal.SIGCONT)


def signal_process(pid: int, number: int) -> None:
    """To a writer of ours; it may have ended."""
    try:
        if b"writer.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, number)
    except OSError:
        return


def start(ranks: int, work: Callable[..., None], *arguments: Any) -> tuple[list[Any], list[Any]]:
    """Processes of one group, and the ends of their pipes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, answers = [], []
    for rank in range(ranks):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": ""}
        process = CONTEXT.Process(target=rank_main, args=(environment, theirs, work, arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        answers.append(mine)
    processes[0].store = store  # it must outlive the ranks
    return processes, answers


def rank_main(environment: dict[str, Any], answer: Any, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What a process does."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ranks that lose their peers complain, and may
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        work(answer, *arguments)
        os._exit(0)


def make_state(step: int) -> dict[str, DTensor]:
    """Tensors that are the step, everywhere."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((ROWS, COLUMNS), float(step))
    return {f"model/{i}": distribute_tensor(full, mesh, [Shard(0)]) for i in range(TENSORS)}


def manager_of(folder: Path, mode: str, state: dict[str, Any]) -> CheckpointManager:
    """A manager that keeps two steps."""
    options = Checkpoint(async_mode=mode, keep_latest_k=2, writer_timeout_seconds=0.3)  # pyright: ignore
    return CheckpointManager(options, folder=folder / "checkpoint", state=lambda: state, extra_files={})


def save_until_killed(_answer: Any, folder: Path, mode: str, again: bool) -> None:
    """A rank that trains and saves; with `again` the same step, and each save waits for the one before."""
    state, rank = make_state(0), dist.get_rank()
    manager = manager_of(folder, mode, state)
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


def load_newest(answer: Any, folder: Path, mode: str) -> None:
    """A rank that goes on: it tells the save that its values are of, or what is wrong with them."""
    state = make_state(-1)
    manager = manager_of(folder, mode, state)
    try:
        progress = manager.find_resume_point()
        manager.load()
    except Exception as error:  # noqa: BLE001, whatever it is, it is a loss
        answer.send(f"{type(error).__name__}: {error}")
        return
    values = {value for tensor in state.values() for value in tensor.to_local().unique().tolist()}
    bad = list((folder / "checkpoint").glob("*.bad-*"))
    expected = {-1.0} if progress is None else {float(progress.tokens_seen)}
    if bad or not values <= expected:
        answer.send(f"{bad or sorted(values)} instead of {expected}")
    else:
        answer.send(0 if progress is None else progress.tokens_seen)


def wait_for(holds: Callable[[], bool]) -> None:
    """For half a minute at most."""
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
