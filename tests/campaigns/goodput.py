"""Measures the share of the time that is spent on training (goodput) while processes are killed at intervals.

    python tests/campaigns/goodput.py --seconds=300 --every=20

Three processes train, and on a schedule drawn from --seed one of them gets SIGKILL and is started again --revive
seconds later. In the first round they are three replica groups; in the second, one run of three ranks, all of which end
and resume from the latest checkpoint (saved every --interval steps). Prints for each round: steps done, steps trained
twice, goodput (steps times the median time of a step, over the time of the round), and the productive share of the
survivors' time: a step that takes more than twice the median counts as one median step. A run without replica groups
has no survivors. Start-up is faster here than in production: processes come from a server that has loaded torch.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from benchmarks.turns import processor_name
from tests.support.cluster import HEARTBEAT_MS, Cluster
from tests.support.runs import Ranks, losses, make_corpus, options, rows

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
    """Measurements of one round."""

    seconds: float
    deaths: int
    steps: int
    repeated: int
    step_seconds: float
    """Median."""
    survivors: float | None
    """Share of the time in which the surviving groups trained; None without survivors."""

    @property
    def goodput(self) -> float:
        """Share of the time that the steps would have taken undisturbed."""
        return self.steps * self.step_seconds / self.seconds


class Schedule:
    """When which process is killed."""

    def __init__(self, options: argparse.Namespace):
        source = random.Random(options.seed)
        count = int(options.seconds / options.every)
        self._left = [(options.every * (number + 0.5), source.randrange(MEMBERS)) for number in range(count)]
        self._start = time.monotonic()
        self.seconds = options.seconds

    def victim(self) -> int | None:
        """Returns which process is to be killed now."""
        if self._left and self.elapsed >= self._left[0][0]:
            return self._left.pop(0)[1]
        return None

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.elapsed >= self.seconds


def with_groups(corpus: Path, folder: Path, options: argparse.Namespace) -> Outcome:
    """Trains with three replica groups; the others continue when one is killed."""
    changes = {**SIZES, "checkpoint__interval": options.interval}
    with Cluster(corpus, folder, groups=MEMBERS, revive_seconds=options.revive, **changes) as cluster:
        cluster.start_all().watch_over(until=lambda: min(map(cluster.step_of, range(MEMBERS))) > 5)
        first, schedule = cluster.step_of(0), Schedule(options)

        def strike() -> bool:
            victim = schedule.victim()
            if victim in cluster.running:
                cluster.running[victim].signal(signal.SIGKILL)
            return schedule.is_over and max(map(cluster.step_of, range(MEMBERS))) > first + 1

        cluster.watch_over(until=strike, timeout=2 * options.seconds + 60)
        seconds = schedule.elapsed
        done = [line for lines in cluster.records().values() for line in lines if line.get("committed")]
        last = max(line["step"] for line in done)
        begin = min(line["time"] for line in done if line["step"] > first)
        gaps = [end - start for group in range(MEMBERS) for start, end in cluster.gaps(group) if end > begin]
        return Outcome(
            seconds=seconds,
            deaths=len(cluster.deaths),
            steps=last - first,
            repeated=0,
            step_seconds=median(gaps),
            survivors=productive_share(gaps),
        )


def productive_share(gaps: list[float]) -> float:
    """Returns the share of the time between steps that is not in excess of twice the median."""
    usual = median(gaps)
    return sum(gap if gap < 2 * usual else usual for gap in gaps) / sum(gaps)


def with_restarts(corpus: Path, folder: Path, options: argparse.Namespace) -> Outcome:
    """Trains one run, which resumes from its latest checkpoint after a kill."""
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
    """Returns the options of the run of three ranks."""
    return options(corpus, folder, **SIZES, checkpoint__interval=interval)


def newest_checkpoint(folder: Path) -> int:
    """Returns the step of the latest checkpoint; 0 if there is none."""
    found = (folder / "run" / "checkpoint").glob("step-*")
    return max((int(path.name[5:]) for path in found if path.name[5:].isdigit()), default=0)


def gaps_of(times: list[float]) -> list[float]:
    """Returns the time from each to the next."""
    return [after - before for before, after in pairwise(times)]


def main(argv: list[str]) -> int:
    """Runs both rounds with the same schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each round")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--revive", type=float, default=5.0, help="seconds until what died is started again")
    parser.add_argument("--interval", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    choices = parser.parse_args(argv)
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes on the way out
    found = {}
    print(processor_name())
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
