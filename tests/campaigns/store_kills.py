"""Kills runs whose checkpoints go to an object store, and checks that no committed step is lost.

    python tests/campaigns/store_kills.py --kills=100 --seed=1
    python tests/campaigns/store_kills.py --kills=0 --outage=20

Ranks save step after step into a local folder and a server on loopback, each step with values of its own, and keep two
steps in each tier. At a random moment of saves, uploads and deletions, a rank or all are killed by SIGKILL, in some
cases while the server answers 503, stalls or cuts connections. Then another number of ranks resumes, in half of the
cases without the local folder, and the next ranks continue from there, in the same store. A case fails if the step
found is older than the last one that was reported as committed in what is left, if the values are not all of that step,
or if a rank fails.

With --outage, runs of the trainer with the default bounds have no use of the server for so many seconds: one each in
which it is gone, answers 503, or stalls. A run fails if a step is not trained or is trained twice, a committed one is
gone, an upload is given up, or the last step is not in the store. Exits with 1 if any case did.
"""

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

import torch
import torch.distributed as dist

from tests.campaigns.checkpoint_fuzz import MODES, make_state, wait_for
from tests.support.checkpoint_states import rank_of_a_group
from tests.support.harness import RankFailed, run_ranks, start_ranks
from tests.support.object_server import ObjectServer, served_process
from tests.support.runs import Ranks, losses, make_corpus, options, rows, wait_for_step
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.checkpoint.remote import open_remote
from torchtitan_clone.config.schema import Checkpoint

TROUBLES = ("pass", "pass", "pass", "busy", "stall", "cut")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The random choices of one case."""

    mode: str
    ranks: int
    later_ranks: int
    trouble: str
    """What the proxy does in the last moments before the kill."""
    seconds: float
    """From the first save to the kill."""
    kills_all: bool
    loses_folder: bool

    @staticmethod
    def draw(source: random.Random) -> "Kill":
        """Draws a case."""
        return Kill(
            mode=source.choice(MODES),
            ranks=source.randint(1, 2),
            later_ranks=source.randint(1, 3),
            trouble=source.choice(TROUBLES),
            seconds=source.uniform(0.0, 2.0),
            kills_all=source.random() < 0.5,
            loses_folder=source.random() < 0.5,
        )


def build_manager(folder: Path, url: str, *, state: dict[str, torch.Tensor], mode: str) -> CheckpointManager:
    """Returns a manager that keeps two steps in each tier."""
    checkpoint = Checkpoint(
        folder=url, interval=1, keep_latest_k=2, local_keep_latest_k=2, async_mode=mode, store_timeout_seconds=20.0
    )  # pyright: ignore[reportArgumentType]
    return CheckpointManager(checkpoint, folder=folder / "local", state=lambda: state, config="")


class StepsInStore(logging.Handler):
    """Writes the number of each step that is committed in the store to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("step %d is in %s: %s in"):
            append(self._file, record.args[0])


def append(file: Path, step: object) -> None:
    with file.open("a") as stream:
        stream.write(f"{step}\n")


def newest(file: Path) -> int:
    """Returns the largest number in a file; 0 without one."""
    return max(map(int, file.read_text().split()), default=0) if file.exists() else 0


def save_until_killed(folder: Path, url: str, mode: str) -> None:
    """Resumes and saves step after step, without an end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ranks that lose their peers complain
    logger = logging.getLogger("torchtitan_clone")
    logger.setLevel(logging.INFO)
    logger.addHandler(StepsInStore(folder / "stored"))
    with rank_of_a_group():
        state = make_state(0)
        manager = build_manager(folder, url, state=dict(state), mode=mode)
        first = manager.find_resume_point()
        manager.load()
        for step in range(first.step + 1 if first else 1, 1_000_000):
            manager.wait_for_staging()
            for tensor in state.values():
                tensor.to_local().fill_(step)
            manager.save(Progress(step=step, tokens_seen=step, skipped_steps=0, data={}))
            for report in manager.reports():
                if report.error is None:
                    append(folder / "saved", report.step)
            if dist.get_rank() == 0:
                (folder / "started").touch()
            time.sleep(0.02)


def load_newest(folder: Path, url: str) -> int | str:
    """Resumes; returns the step that all values of this rank are of, or what is wrong with them."""
    with rank_of_a_group():
        state = make_state(-1)
        manager = build_manager(folder, url, state=dict(state), mode=MODES[0])
        progress = manager.find_resume_point()
        manager.load()
        failure = manager.finish_uploads()
        values = {float(value) for tensor in state.values() for value in tensor.to_local().unique()}
        step = progress.step if progress else 0
        if failure or values - {float(step or -1)}:
            return f"step {step}, values {values}, {failure}"
        return step


def run_case(case: Kill, folder: Path, *, server: ObjectServer, url: str) -> str | None:
    """Runs one case; returns what is wrong."""
    (folder / "started").unlink(missing_ok=True)
    started = start_ranks(save_until_killed, case.ranks, folder, url, case.mode, env=server.env)
    processes = [rank.process for rank in started]
    wait_for(lambda: (folder / "started").exists() or not all(process.is_alive() for process in processes))
    time.sleep(case.seconds * 0.7)
    server.proxy.mode = case.trouble
    time.sleep(case.seconds * 0.3)
    if not case.kills_all:
        processes[-1].kill()
        time.sleep(0.2)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    server.proxy.mode = "pass"
    expected = newest(folder / "stored")
    if case.loses_folder:
        shutil.rmtree(folder / "local", ignore_errors=True)
        (folder / "saved").unlink(missing_ok=True)
    else:
        expected = max(expected, newest(folder / "saved"))
    try:
        found = run_ranks(load_newest, case.later_ranks, folder, url, timeout=120, env=server.env)
    except RankFailed as error:
        return f"a rank of the run that resumes failed: {error}"
    if len(set(map(str, found))) != 1 or not isinstance(found[0], int):
        return f"values of {found}"
    append(folder / "stored", found[0])  # the start uploads what it resumes from
    return f"step {found[0]} is older than {expected}, which was committed" if found[0] < expected else None


def run_outage(trouble: str, seconds: float, folder: Path, *, server: ObjectServer, url: str) -> str | None:
    """Trains while the server is in trouble for so many seconds; prints what happened, returns what is wrong."""
    stored = {"folder": url, "interval": 20, "keep_latest_k": 0, "async_mode": MODES[0]}
    changes = {"training__steps": 400, **{f"checkpoint__{name}": value for name, value in stored.items()}}
    argv = options(folder / "data" / "corpus", folder / trouble, **changes)
    started = Ranks(argv, world_size=2, log_folder=folder / trouble, env=server.env)
    wait_for_step(folder / trouble, 50)
    remote, first = open_remote(url, timeout_seconds=10), max(losses(folder / trouble))
    before = remote.committed_steps()
    server.proxy.mode = trouble
    time.sleep(seconds)
    last = max(losses(folder / trouble))
    server.proxy.mode = "pass"
    code, output = started.wait(600)
    after, trained = remote.committed_steps(), [row["step"] for row in rows(folder / trouble) if "loss" in row]
    print(f"{seconds:g} s of {trouble}: steps {first} to {last} trained meanwhile, {before} in the store before")
    print(f"exit code {code}, {len(trained)} steps trained, {len(after)} in the store, the last one {after[-1]}")
    print(*(line for line in output.splitlines() if "trying again" in line or "is not" in line), sep="\n")
    is_whole = code == 0 and trained == [*range(1, 401)] and after[-1] == 400 and {*before} <= {*after}
    return None if is_whole and last > first and "is not in" not in output else output


def main() -> int:
    """Runs the cases and prints a summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    parser.add_argument("--outage", type=float, default=0.0, help="seconds for which runs lose the server")
    choices = parser.parse_args()
    source = random.Random(choices.seed)
    failures, kinds = 0, Counter[str]()
    with served_process() as server, tempfile.TemporaryDirectory(prefix="store_kills_") as name:
        folder, url = Path(name), server.make_bucket()
        for number in range(choices.kills):
            case = Kill.draw(source)
            error = run_case(case, folder, server=server, url=url)
            kinds[f"{'folder lost' if case.loses_folder else 'folder kept'}, server {case.trouble}"] += 1
            if error:
                failures += 1
                print(f"{number:4} {case}: {error}", flush=True)
        steps = newest(folder / "stored")
        if choices.outage:
            make_corpus(folder / "data" / "corpus")
        for trouble in ("gone", "busy", "stall") if choices.outage else ():
            if error := run_outage(trouble, choices.outage, folder, server=server, url=server.make_bucket()):
                failures += 1
                print(error)
    for kind, count in sorted(kinds.items()):
        print(f"{count:4} kills: {kind}")
    print(
        f"{choices.kills} kills with seed {choices.seed}, {steps} steps: {failures} lost a step or loaded a wrong one"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
