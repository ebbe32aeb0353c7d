"""Trains with replica groups on this machine while faults strike them, and checks that nothing was lost.

    python scripts/inject_faults.py --groups=3 --ranks=2 --faults=kill:all_reduce:20:1:0,nan:gradients:30:0:1
    python scripts/inject_faults.py --groups=3 --random=50 --seed=1 --gap=25

A fault is KIND:PLACE:STEP:GROUP:RANK, for example kill:commit:20:1:0: the first time that rank 0 of group 1 is about to
commit step 20 or a later one. Kinds: kill (SIGKILL), stop (SIGSTOP, 3 s), hang (heartbeats go on), slow (3 s), nan (in
a gradient), exception. Places: between, quorum, forward, gradients, all_reduce, heal_source, heal_target, commit,
committed. A group that dies is started again after --revive seconds. --random=N draws N kills, --gap steps apart.
--lighthouse=STEP:SECONDS kills the lighthouse too, for that long.

Printed: deaths, stalls of the surviving groups, and what is wrong at the end, which should be nothing: all groups must
end with the same bits, and each row of the data must have been committed once. Exit code 1 if not.
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fault_tolerance.cluster import HEARTBEAT_MS, TIMEOUT_MS, Cluster, committed_once
from tests.fault_tolerance.faults import PLACES, Fault
from tests.runs import make_corpus

ROWS = 12
os.environ.setdefault("RUST_LOG", "error")


def main(argv: list[str]) -> int:
    """Runs one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of each group")
    parser.add_argument("--faults", default="", help="KIND:PLACE:STEP:GROUP:RANK, separated by commas")
    parser.add_argument("--lighthouse", default="", help="STEP:SECONDS")
    parser.add_argument("--random", type=int, default=0, help="draw so many kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=int, default=25, help="steps between two random kills")
    parser.add_argument("--revive", type=float, default=0.0, help="seconds until a dead group is started again")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args(argv)
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the groups are ended on the way out
    faults = [parse(text) for text in options.faults.split(",") if text] or drawn(options)
    steps = max((fault.step for fault in faults), default=0) + 40
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "data" / "corpus")
        changes = {"training__global_batch_size": ROWS, "training__steps": steps, "checkpoint__interval": 20}
        cluster = Cluster(
            corpus,
            Path(folder) / "run",
            groups=options.groups,
            ranks=options.ranks,
            revive_seconds=options.revive,
            **changes,
        )
        with cluster:
            return campaign(cluster, faults, steps=steps, options=options)


def parse(text: str) -> Fault:
    """A fault as it is written on the command line."""
    kind, place, step, group, rank = text.split(":")
    return Fault(kind=kind, place=place, step=int(step), group=int(group), rank=int(rank))


def drawn(options: argparse.Namespace) -> list[Fault]:
    """Kills at random places of random ranks; every third death is followed by one while the group heals."""
    source = random.Random(options.seed)
    places = [place for place in PLACES if place != "heal_target"]
    return [
        Fault(
            kind="kill",
            place="heal_target" if number % 6 == 5 else source.choice(places),
            step=10 + options.gap * number,
            group=source.randrange(options.groups),
            rank=source.randrange(options.ranks),
        )
        for number in range(options.random)
    ]


def campaign(cluster: Cluster, faults: list[Fault], *, steps: int, options: argparse.Namespace) -> int:
    """Trains through the faults; reports."""
    start = time.time()
    try:
        cluster.start_all(faults=faults)
        if options.lighthouse:
            step, seconds = options.lighthouse.split(":")
            cluster.watch_over(timeout=options.timeout, until=lambda: cluster.step_of(0) >= int(step))
            cluster.restart_lighthouse(seconds=float(seconds))
        cluster.watch_over(timeout=options.timeout)
    except AssertionError as error:
        print(error)
    for moment, group, codes in cluster.deaths:
        print(f"{moment - start:7.1f} s  group {group} died: exit codes {codes}")
    struck = sum(cluster.log.count(f"fault: Fault(kind='{kind}'") for kind in ("kill", "hang", "exception"))
    heals = cluster.log.count("healed from another replica group")
    wrong = committed_once(cluster.records(), steps=steps, rows=ROWS)
    wrong += [
        f"rank {rank}: the groups ended differently" for rank, found in cluster.digests().items() if len(found) > 1
    ]
    wrong += [f"group {group} did not finish" for group in range(cluster.groups) if group not in cluster.finished]
    if len(cluster.deaths) > struck:
        wrong.append(f"{len(cluster.deaths)} deaths for {struck} deadly faults: a survivor died")
    longest = sorted((stall for group in range(cluster.groups) for stall in cluster.stalls(group)), reverse=True)
    print(f"{steps} steps in {time.time() - start:.0f} s, {len(cluster.deaths)} deaths, {heals} heals")
    for count in sorted({deaths for _, deaths in longest[:40]}):
        shown = [f"{stall:.2f}" for stall, deaths in longest[:40] if deaths == count][:8]
        print(f"longest stalls of survivors, in s, with {count} deaths in them: {', '.join(shown)}")
    print(f"heartbeat {HEARTBEAT_MS} ms, timeout {TIMEOUT_MS} ms")
    print("\n".join(wrong) or "nothing is wrong")
    if wrong:
        print(cluster.log)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
