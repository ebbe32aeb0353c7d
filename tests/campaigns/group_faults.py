"""Trains with replica groups while faults strike them, and checks what is left; run by scripts/inject_faults.py."""

import random
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.support.cluster import Cluster, committed_once
from tests.support.faults import PLACES, Fault

ROWS = 12
GRID_PLACES = [place for place in PLACES if place != "gradients"]
GRID_STEPS = 80
"""A group that dies in step 8 returns well before the last."""
GRID_PACE = 0.05
GRID_REVIVE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A gap between two steps that one process committed; times as time.time()."""

    seconds: float
    """In excess of the median gap."""
    deaths: int
    """Of other replica groups, in that time."""
    group: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one run."""

    seconds: float
    deaths: int
    heals: int
    stalls: list[Stall]
    wrong: list[str]


def run_campaign(corpus: Path, folder: Path, options: Namespace) -> int:
    """Trains through the faults of the command line and prints a report; returns the exit code."""
    faults = [parse_fault(text) for text in options.faults.split(",") if text] or draw_faults(options)
    steps = max((fault.step for fault in faults), default=0) + 40
    cluster = build_cluster(
        corpus,
        folder,
        steps,
        timeouts=options.timeouts,
        groups=options.groups or 3,
        ranks=options.ranks or 1,
        revive_seconds=options.revive,
        pace=options.pace,
    )
    with cluster:
        outcome = train_through(cluster, faults, steps=steps, options=options)
        for moment, group, codes in cluster.deaths:
            print(f"{moment - cluster.starts[0][0]:7.1f} s  group {group} died: exit codes {codes}")
        print(f"{steps} steps in {outcome.seconds:.0f} s, {outcome.deaths} deaths, {outcome.heals} heals")
        for count in sorted({stall.deaths for stall in outcome.stalls[:40]}):
            shown = [f"{stall.seconds:.2f}" for stall in outcome.stalls[:40] if stall.deaths == count][:8]
            print(f"longest stalls of survivors, in s, during which {count} groups died: {', '.join(shown)}")
        print_longest_stall(cluster, outcome)
        print(f"timeouts of heartbeats, collectives and joining: {options.timeouts} ms")
        print("\n".join(outcome.wrong) or "nothing is wrong")
        if outcome.wrong:
            print(cluster.log)
    return int(bool(outcome.wrong))


def run_grid(corpus: Path, folder: Path, options: Namespace) -> int:
    """Kills one rank at each place in a run of its own and prints a table; returns the exit code."""
    bad = 0
    print(f"{'groups':>6}{'ranks':>6}  {'place':12}{'deaths':>7}{'heals':>6}{'stall (s)':>10}{'seconds':>8}  verdict")
    cells = [
        (groups, ranks, place)
        for groups in ([options.groups] if options.groups else [2, 3])
        for ranks in ([options.ranks] if options.ranks else [1, 2])
        for place in options.places.split(",")
    ]
    for groups, ranks, place in cells:
        cluster = build_cluster(
            corpus,
            folder / f"{groups}x{ranks}_{place}",
            GRID_STEPS,
            timeouts=options.timeouts,
            groups=groups,
            ranks=ranks,
            revive_seconds=GRID_REVIVE_SECONDS,
            pace=GRID_PACE,
        )
        with cluster:
            faults = faults_of_cell(place, groups=groups, ranks=ranks)
            outcome = train_through(cluster, faults, steps=GRID_STEPS, options=options)
            # With two groups the state dies with the source: both start over, and none may be ahead of the other.
            must_heal = groups > 2 or place != "heal_source"
            limit = longest_stall(options)
            wrong = find_cell_errors(outcome, deaths=len(faults), must_heal=must_heal, longest=limit)
            longest = max((stall.seconds for stall in outcome.stalls if stall.deaths), default=0.0)
            counts = f"{outcome.deaths:7}{outcome.heals:6}{longest:10.2f}{outcome.seconds:8.1f}"
            print(f"{groups:6}{ranks:6}  {place:12}{counts}  {'; '.join(wrong) or 'good'}", flush=True)
            if wrong:
                print_longest_stall(cluster, outcome)
            bad += bool(wrong)
    print(f"timeouts of heartbeats, collectives and joining: {options.timeouts} ms; {bad} cells are bad")
    return int(bad > 0)


def faults_of_cell(place: str, *, groups: int, ranks: int) -> list[Fault]:
    """Kills the last rank of group 1 at this place; a place that is reached on a return needs a death before.

    The first rank of group 1 is healed by the last of the other groups.
    """
    first = Fault(kind="kill", place="all_reduce", group=1, rank=ranks - 1, step=8)
    if place in ("configure", "heal_target"):
        return [first, Fault(kind="kill", place=place, group=1, rank=ranks - 1, step=8, returning=True)]
    if place == "heal_source":
        source = 2 if groups > 2 else 0
        return [first, Fault(kind="kill", place=place, group=source, rank=0, step=8)]
    return [Fault(kind="kill", place=place, group=1, rank=ranks - 1, step=8)]


def longest_stall(options: Namespace) -> float:
    """Returns the seconds that a survivor may stall for each death."""
    return int(options.timeouts.partition(":")[0]) / 1000 + 2


def find_cell_errors(outcome: Outcome, *, deaths: int, must_heal: bool, longest: float) -> list[str]:
    """Returns what is wrong with one cell of the grid."""
    wrong = list(outcome.wrong)
    if outcome.deaths != deaths:
        wrong.append(f"{outcome.deaths} deaths instead of {deaths}")
    if must_heal and not outcome.heals:
        wrong.append("no group was healed")
    long = [stall for stall in outcome.stalls if stall.deaths and stall.seconds > longest * stall.deaths]
    return wrong + [f"group {stall.group} stalled {stall.seconds:.2f} s in {stall.deaths} deaths" for stall in long]


def build_cluster(
    corpus: Path,
    folder: Path,
    steps: int,
    *,
    groups: int,
    ranks: int,
    timeouts: str,
    revive_seconds: float,
    pace: float,
) -> Cluster:
    """Returns the replica groups of one run; `timeouts` are those of heartbeats, collectives and joining in ms."""
    heartbeat, collective, join = map(int, timeouts.split(":"))
    return Cluster(
        corpus,
        folder,
        groups=groups,
        ranks=ranks,
        revive_seconds=revive_seconds,
        pace=pace,
        training__global_batch_size=ROWS,
        training__local_batch_size=1 if ROWS % (2 * groups * ranks) else 2,
        training__steps=steps,
        checkpoint__interval=20,
        fault_tolerance__heartbeat_timeout_ms=heartbeat,
        fault_tolerance__process_group_timeout_ms=collective,
        fault_tolerance__join_timeout_ms=join,
    )


def parse_fault(text: str) -> Fault:
    """Parses KIND:PLACE:STEP:GROUP:RANK[:back]."""
    kind, place, step, group, rank, *back = text.split(":")
    returning = bool(back) or place == "heal_target"
    return Fault(kind=kind, place=place, step=int(step), group=int(group), rank=int(rank), returning=returning)


def draw_faults(options: Namespace) -> list[Fault]:
    """Returns kills at random places of random ranks; every sixth strikes a group that is being healed."""
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


def train_through(cluster: Cluster, faults: list[Fault], *, steps: int, options: Namespace) -> Outcome:
    """Trains through the faults and checks what is left."""
    start = time.time()
    wrong: list[str] = []
    try:
        cluster.start_all(faults=faults)
        if options.lighthouse:
            step, seconds = options.lighthouse.split(":")
            cluster.watch_over(timeout=options.timeout, until=lambda: cluster.step_of(0) >= int(step))
            cluster.restart_lighthouse(seconds=float(seconds))
        cluster.watch_over(timeout=options.timeout)
    except AssertionError as error:
        wrong = [str(error)]
    deadly = sum(cluster.log.count(f"fault: Fault(kind='{kind}'") for kind in ("kill", "late", "hang", "exception"))
    wrong += committed_once(cluster.records(), steps=steps, rows=ROWS) + cluster.wrong_rows()
    wrong += [f"rank {rank}: groups ended differently" for rank, found in cluster.digests().items() if len(found) > 1]
    wrong += [f"group {group} did not finish" for group in range(cluster.groups) if group not in cluster.finished]
    if len(cluster.deaths) > deadly:
        wrong.append(f"{len(cluster.deaths)} deaths for {deadly} deadly faults: a survivor died")
    return Outcome(
        seconds=time.time() - start,
        deaths=len(cluster.deaths),
        heals=cluster.log.count("healed from another replica group"),
        stalls=find_stalls(cluster),
        wrong=wrong,
    )


def print_longest_stall(cluster: Cluster, outcome: Outcome) -> None:
    """Prints the events of the longest stall."""
    for stall in outcome.stalls[:1]:
        print(f"the longest stall, {stall.seconds:.2f} s of group {stall.group}:")
        print("\n".join(timeline(cluster, stall)))


def find_stalls(cluster: Cluster) -> list[Stall]:
    """Returns the gaps between commits of all groups, the longest first."""
    found: list[Stall] = []
    for group in range(cluster.groups):
        deaths = [moment for moment, dead, _ in cluster.deaths if dead != group]
        gaps = cluster.gaps(group)
        usual = median([end - start for start, end in gaps] or [0.0])
        for start, end in gaps:
            count = sum(start < moment < end for moment in deaths)
            found.append(Stall(seconds=end - start - usual, deaths=count, group=group, start=start, end=end))
    return sorted(found, key=lambda stall: stall.seconds, reverse=True)


def timeline(cluster: Cluster, stall: Stall) -> list[str]:
    """Returns a line for each event during a stall: when groups died, started, were ready and left a quorum."""
    events = [(moment, f"group {group} is found dead") for moment, group, _ in cluster.deaths]
    events += [(moment, f"group {group} is started") for moment, group in cluster.starts]
    for name, lines in cluster.records().items():
        is_own = name == f"replica-{stall.group}/rows.rank0.jsonl"
        for line in (line for line in lines if is_own or "started" in line or "left" in line):
            what = {key: value for key, value in line.items() if key not in ("time", "rows")}
            events.append((line["time"], f"{name.removesuffix('.jsonl')}: {what}"))
    inside = sorted(event for event in events if stall.start <= event[0] <= stall.end)
    return [f"{moment - stall.start:7.3f} s  {what}" for moment, what in inside]
