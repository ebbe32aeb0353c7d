"""Measures how much training is left of the time when something is killed every so often.

    python benchmarks/goodput.py --seconds=300 --every=20

Three processes train, and on a schedule drawn from --seed one of them gets SIGKILL and is started again --revive
seconds later. In the first round they are three replica groups; in the second one run of three ranks, which dies as a
whole and goes on from its newest checkpoint (saved every --interval steps). Printed for each: steps done, steps trained
twice, the share of the time that the steps would have taken undisturbed (goodput), and what the survivors of the kills
made of theirs: the time of every process from its first step to its last is productive but for what a step takes longer
than usual, where that is more than twice as long. Of a run that dies as a whole nobody trains on. Starting up is faster
here than anywhere: processes come from a server that has torch loaded already.
"""

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_clone.testing.cluster import HEARTBEAT_MS, Cluster
from torchtitan_clone.testing.runs import Ranks, losses, make_corpus, options, rows

os.environ.setdefault("RUST_LOG", "error")
MEMBERS = 3
SIZES = {
    "training__global_batch_size": 12,
    "training__local_batch_size": 2,
    "training__seq_len": 128,
    "training__steps": 1_000_000,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one way of training made of the time."""

    seconds: float
    deaths: int
    steps: int
    repeated: int
    step_seconds: float
    """Median."""
    survivors: float | None
    """Share of their time in which the groups that lived trained; None: none did."""

    @property
    def goodput(self) -> float:
        """Share of the time."""
        return self.steps * self.step_seconds / self.seconds


class Schedule:
    """When who is killed."""

    def __init__(self, options: argparse.Namespace):
        source = random.Random(options.seed)
        count = int(options.seconds / options.every)
        self._left = [(options.every * (number + 0.5), source.randrange(MEMBERS)) for number in range(count)]
        self._start = time.monotonic()
        self.seconds = options.seconds

    def victim(self) -> int | None:
        """Who is to be killed now."""
        if self._left and time.monotonic() - self._start >= self._left[0][0]:
            return self._left.pop(0)[1]
        return None

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self._start >= self.seconds


def with_groups(corpus: Path, folder: Path, options: argparse.Namespace) -> Outcome:
    """Three replica groups, of which two go on."""
    changes = {**SIZES, "checkpoint__interval": options.interval}
    with Cluster(corpus, folder, groups=MEMBERS, revive_seconds=options.revive, **changes) as cluster:
        cluster.start_all().watch_over(until=lambda: min(map(cluster.step_of, range(MEMBERS))) > 5)
        first, schedule = cluster.step_of(0), Schedule(options)

        def strike() -> bool:
            victim = schedule.victim()
            if victim in cluster.running:
                cluster.running[victim].signal(signal.SIGKILL)
            return schedule.is_over

        cluster.watch_over(until=strike, timeout=2 * options.seconds)
        done = [line for lines in cluster.records().values() for line in lines if line.get("committed")]
        last = max(line["step"] for line in done)
        begin = min(line["time"] for line in done if line["step"] > first)
        gaps = [end - start for group in range(MEMBERS) for start, end in cluster.gaps(group) if end > begin]
        return Outcome(
            seconds=options.seconds,
            deaths=len(cluster.deaths),
            steps=last - first,
            repeated=0,
            step_seconds=median(gaps),
            survivors=productive_share(gaps),
        )


def productive_share(gaps: list[float]) -> float:
    """Of the time between steps, without what some of them took longer than is usual."""
    usual = median(gaps)
    return sum(gap if gap < 2 * usual else usual for gap in gaps) / sum(gaps)


def with_restarts(corpus: Path, folder: Path, options: argparse.Namespace) -> Outcome:
    """One run, which starts again from its newest checkpoint."""
    argv = argv_of(corpus, folder, interval=options.interval)
    run = Ranks(argv, world_size=MEMBERS, log_folder=folder)
    while max(losses(folder), default=0) <= 5:
        time.sleep(0.01)
    first, schedule, deaths, highest, repeated = max(losses(folder)), Schedule(options), 0, 0, 0
    while not schedule.is_over:
        if schedule.victim() is not None:
            highest = max(losses(folder), default=0)
            run.signal(signal.SIGKILL)
            run.join()
            deaths += 1
            time.sleep(options.revive)
            repeated += highest - newest_checkpoint(folder)
            run = Ranks(argv, world_size=MEMBERS, log_folder=folder)
        time.sleep(0.01)
    run.signal(signal.SIGKILL)
    run.join()
    found = [row["time"] for row in rows(folder) if "loss" in row]
    return Outcome(
        seconds=options.seconds,
        deaths=deaths,
        steps=max(losses(folder), default=0) - first,
        repeated=repeated,
        step_seconds=median(gaps_of(found) or [0.0]),
        survivors=None,
    )


def argv_of(corpus: Path, folder: Path, *, interval: int) -> list[str]:
    """The run of three ranks."""
    return options(corpus, folder, **SIZES, checkpoint__interval=interval)


def newest_checkpoint(folder: Path) -> int:
    """Its step; 0 where there is none."""
    found = (folder / "run" / "checkpoint").glob("step-*")
    return max((int(path.name[5:]) for path in found if path.name[5:].isdigit()), default=0)


def gaps_of(times: list[float]) -> list[float]:
    """From each to the next."""
    return [after - before for before, after in pairwise(times)]


def main(argv: list[str]) -> int:
    """Both rounds, with the same schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each round")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--revive", type=float, default=5.0, help="seconds until what died is started again")
    parser.add_argument("--interval", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    choices = parser.parse_args(argv)
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    found = {}
    print(f"{'':18}{'steps':>7}{'repeated':>10}{'deaths':>8}{'step (s)':>10}{'goodput':>9}{'survivors':>11}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "data" / "corpus")
        for name, train in (("replica groups", with_groups), ("restarts", with_restarts)):
            result = train(corpus, Path(folder) / name.replace(" ", "_"), choices)
            found[name] = {**vars(result), "goodput": result.goodput}
            print(
                f"{name:18}{result.steps:7}{result.repeated:10}{result.deaths:8}{result.step_seconds:10.3f}"
                f"{result.goodput:9.1%}{'none' if result.survivors is None else f'{result.survivors:.1%}':>11}",
                flush=True,
            )
    print(f"a kill every {choices.every:g} s, start again after {choices.revive:g} s, heartbeat {HEARTBEAT_MS} ms")
    if choices.json:
        choices.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
