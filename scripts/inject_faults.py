"""Trains with replica groups on this machine while faults strike them, and checks that nothing was lost.

    python scripts/inject_faults.py --groups=3 --ranks=2 --faults=kill:all_reduce:20:1:0,nan:gradients:30:0:1
    python scripts/inject_faults.py --groups=3 --random=50 --seed=1 --gap=25
    python scripts/inject_faults.py --grid

A fault is KIND:PLACE:STEP:GROUP:RANK, for example kill:commit:20:1:0: the first time that rank 0 of group 1 is about to
commit step 20 or a later one. Kinds: kill (SIGKILL), late (SIGKILL after half a second), stop (SIGSTOP, 3 s), hang
(heartbeats go on), slow (3 s), nan (in a gradient), exception. Places: between (two steps), quorum (its answer is
there), configure (the process group of a new quorum connects), forward, gradients, all_reduce, heal_source,
heal_target, commit, committed. A sixth part, such as kill:configure:20:1:0:back, strikes the group when it has died and
comes back. A group that dies is started again after --revive seconds. --random=N draws N kills, --gap steps apart.
--lighthouse=STEP:SECONDS kills the lighthouse too, for that long.

Printed: deaths, stalls of the surviving groups, and what is wrong at the end, which should be nothing: all groups must
end with the same bits, and each row of the data must have been committed once. Exit code 1 if not.

--grid kills one rank at each place in turn, with 2 and 3 groups of 1 and 2 ranks (or as --groups, --ranks and --places
say), each in a run of its own, and prints a table. There a survivor that stalls for more than the heartbeat timeout
plus 2 s, per death, is wrong too. --timeouts=5000:10000:60000 are those that users have by default.
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_clone.testing.cluster import HEARTBEAT_MS, JOIN_MS, TIMEOUT_MS, Cluster, Stall, committed_once
from torchtitan_clone.testing.faults import PLACES, Fault
from torchtitan_clone.testing.runs import make_corpus

ROWS = 12
GRID = [place for place in PLACES if place != "gradients"]
GRID_STEPS, GRID_PACE, GRID_REVIVE = 80, 0.05, 1.0
"""A group that dies in step 8 is back well before the last."""
os.environ.setdefault("RUST_LOG", "error")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    seconds: float
    deaths: int
    heals: int
    stalls: list[Stall]
    wrong: list[str]


def main(argv: list[str]) -> int:
    """Runs one campaign, or the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int)
    parser.add_argument("--ranks", type=int, help="of each group")
    parser.add_argument("--faults", default="", help="KIND:PLACE:STEP:GROUP:RANK, separated by commas")
    parser.add_argument("--lighthouse", default="", help="STEP:SECONDS")
    parser.add_argument("--random", type=int, default=0, help="draw so many kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=int, default=25, help="steps between two random kills")
    parser.add_argument("--revive", type=float, default=0.0, help="seconds until a dead group is started again")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that every step sleeps besides")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument(
        "--timeouts", default=f"{HEARTBEAT_MS}:{TIMEOUT_MS}:{JOIN_MS}", help="HEARTBEAT:COLLECTIVE:JOIN, in ms"
    )
    parser.add_argument("--grid", action="store_true", help="kill at every place")
    parser.add_argument("--places", default=",".join(GRID), help="of the grid, separated by commas")
    options = parser.parse_args(argv)
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the groups are ended on the way out
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "data" / "corpus")
        train = grid if options.grid else campaign
        return train(corpus, Path(folder) / "run", options)


def campaign(corpus: Path, folder: Path, options: argparse.Namespace) -> int:
    """Trains through the faults asked for; reports."""
    faults = [parse(text) for text in options.faults.split(",") if text] or drawn(options)
    steps = max((fault.step for fault in faults), default=0) + 40
    cluster = build(
        corpus, folder, steps, groups=options.groups or 3, ranks=options.ranks or 1, revive_seconds=options.revive,
        pace=options.pace, timeouts=options.timeouts,
    )  # fmt: skip
    with cluster:
        outcome = trained(cluster, faults, steps=steps, options=options)
        start = cluster.starts[0][0]
        for moment, group, codes in cluster.deaths:
            print(f"{moment - start:7.1f} s  group {group} died: exit codes {codes}")
        print(f"{steps} steps in {outcome.seconds:.0f} s, {outcome.deaths} deaths, {outcome.heals} heals")
        for count in sorted({stall.deaths for stall in outcome.stalls[:40]}):
            shown = [f"{stall.seconds:.2f}" for stall in outcome.stalls[:40] if stall.deaths == count][:8]
            print(f"longest stalls of survivors, in s, with {count} deaths in them: {', '.join(shown)}")
        print_longest(cluster, outcome)
        print(f"timeouts of heartbeats, collectives and joining: {options.timeouts} ms")
        print("\n".join(outcome.wrong) or "nothing is wrong")
        if outcome.wrong:
            print(cluster.log)
    return int(bool(outcome.wrong))


def grid(corpus: Path, folder: Path, options: argparse.Namespace) -> int:
    """One run for each number of groups, number of ranks and place; a table."""
    bad = 0
    print(f"{'groups':>6}{'ranks':>6}  {'place':12}{'deaths':>7}{'heals':>6}{'stall (s)':>10}{'seconds':>8}  verdict")
    for groups in [options.groups] if options.groups else [2, 3]:
        for ranks in [options.ranks] if options.ranks else [1, 2]:
            for place in options.places.split(","):
                cluster = build(
                    corpus, folder / f"{groups}x{ranks}_{place}", GRID_STEPS, groups=groups, ranks=ranks,
                    revive_seconds=GRID_REVIVE, pace=GRID_PACE, timeouts=options.timeouts,
                )  # fmt: skip
                with cluster:
                    faults = faults_of_cell(place, ranks=ranks)
                    outcome = trained(cluster, faults, steps=GRID_STEPS, options=options)
                    wrong = wrong_in_cell(outcome, deaths=len(faults), longest=longest_stall(options))
                    longest = max((stall.seconds for stall in outcome.stalls if stall.deaths), default=0.0)
                    print(
                        f"{groups:6}{ranks:6}  {place:12}{outcome.deaths:7}{outcome.heals:6}{longest:10.2f}"
                        f"{outcome.seconds:8.1f}  {'; '.join(wrong) or 'good'}",
                        flush=True,
                    )
                    if wrong:
                        print_longest(cluster, outcome)
                    bad += bool(wrong)
    print(f"timeouts of heartbeats, collectives and joining: {options.timeouts} ms; {bad} cells are bad")
    return int(bad > 0)


def faults_of_cell(place: str, *, ranks: int) -> list[Fault]:
    """The last rank of group 1 dies at this place; what happens on a return needs a death before."""
    last = {"kind": "kill", "group": 1, "rank": ranks - 1, "step": 8}
    if place in ("configure", "heal_target"):
        return [Fault(place="all_reduce", **last), Fault(place=place, returning=True, **last)]
    if place == "heal_source":
        return [Fault(place="all_reduce", **last), Fault(kind="kill", place=place, step=8, group=0, rank=0)]
    return [Fault(place=place, **last)]


def longest_stall(options: argparse.Namespace) -> float:
    """Seconds that a survivor may stand still, for each death in them."""
    return int(options.timeouts.partition(":")[0]) / 1000 + 2


def wrong_in_cell(outcome: Outcome, *, deaths: int, longest: float) -> list[str]:
    """What should not be."""
    wrong = list(outcome.wrong)
    if outcome.deaths != deaths:
        wrong.append(f"{outcome.deaths} deaths instead of {deaths}")
    if not outcome.heals:
        wrong.append("nobody was healed")
    long = [stall for stall in outcome.stalls if stall.deaths and stall.seconds > longest * stall.deaths]
    return wrong + [f"group {stall.group} stalled {stall.seconds:.2f} s in {stall.deaths} deaths" for stall in long]


def build(corpus: Path, folder: Path, steps: int, *, timeouts: str, **options) -> Cluster:
    """The groups of one run."""
    names = ("heartbeat_timeout_ms", "process_group_timeout_ms", "join_timeout_ms")
    changes = {
        **{f"fault_tolerance__{name}": int(ms) for name, ms in zip(names, timeouts.split(":"), strict=True)},
        "training__global_batch_size": ROWS,
        "training__local_batch_size": 1 if ROWS % (2 * options["groups"] * options["ranks"]) else 2,
        "training__steps": steps,
        "checkpoint__interval": 20,
    }
    return Cluster(corpus, folder, **options, **changes)


def parse(text: str) -> Fault:
    """A fault as it is written on the command line."""
    kind, place, step, group, rank, *back = text.split(":")
    returning = bool(back) or place == "heal_target"
    return Fault(kind=kind, place=place, step=int(step), group=int(group), rank=int(rank), returning=returning)


def drawn(options: argparse.Namespace) -> list[Fault]:
    """Kills at random places of random ranks; every sixth strikes a group that is being healed."""
    source = random.Random(options.seed)
    places = [place for place in PLACES if place != "heal_target"]
    return [
        Fault(
            kind="kill",
            place="heal_target" if number % 6 == 5 else source.choice(places),
            step=10 + options.gap * number,
            group=source.randrange(options.groups or 3),
            rank=source.randrange(options.ranks or 1),
            returning=number % 6 == 5,
        )
        for number in range(options.random)
    ]


def trained(cluster: Cluster, faults: list[Fault], *, steps: int, options: argparse.Namespace) -> Outcome:
    """Trains through the faults, and looks at what is left."""
    start, wrong = time.time(), []
    try:
        cluster.start_all(faults=faults)
        if options.lighthouse:
            step, seconds = options.lighthouse.split(":")
            cluster.watch_over(timeout=options.timeout, until=lambda: cluster.step_of(0) >= int(step))
            cluster.restart_lighthouse(seconds=float(seconds))
        cluster.watch_over(timeout=options.timeout)
    except AssertionError as error:
        wrong = [str(error)]
    struck = sum(cluster.log.count(f"fault: Fault(kind='{kind}'") for kind in ("kill", "late", "hang", "exception"))
    wrong += committed_once(cluster.records(), steps=steps, rows=ROWS) + cluster.wrong_rows()
    wrong += [f"rank {rank}: groups ended differently" for rank, found in cluster.digests().items() if len(found) > 1]
    wrong += [f"group {group} did not finish" for group in range(cluster.groups) if group not in cluster.finished]
    if len(cluster.deaths) > struck:
        wrong.append(f"{len(cluster.deaths)} deaths for {struck} deadly faults: a survivor died")
    return Outcome(
        seconds=time.time() - start,
        deaths=len(cluster.deaths),
        heals=cluster.log.count("healed from another replica group"),
        stalls=cluster.stalls(),
        wrong=wrong,
    )


def print_longest(cluster: Cluster, outcome: Outcome) -> None:
    """What the longest stall consists of."""
    for stall in outcome.stalls[:1]:
        print(f"the longest stall, {stall.seconds:.2f} s of group {stall.group}:")
        print("\n".join(cluster.timeline(stall)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
