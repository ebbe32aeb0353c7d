"""Trains with replica groups on this machine while faults strike them, and checks that nothing was lost.

    python scripts/inject_faults.py --groups=3 --ranks=2 --faults=kill:all_reduce:20:1:0,nan:gradients:30:0:1
    python scripts/inject_faults.py --groups=3 --random=50 --seed=1 --gap=25
    python scripts/inject_faults.py --grid

A fault is KIND:PLACE:STEP:GROUP:RANK, for example kill:commit:20:1:0: the first time that rank 0 of group 1 is about to
commit step 20 or a later one. Kinds: kill (SIGKILL), late (SIGKILL after half a second), stop (SIGSTOP, 3 s), hang
(heartbeats continue), slow (3 s), nan (in a gradient), exception. Places: between (two steps), quorum (formed),
configure (the process group of a new quorum connects), forward, gradients, all_reduce, heal_source, heal_target,
commit, committed. A sixth field, such as kill:configure:20:1:0:back, strikes the group when it has died and returns.
A group that dies is started again after --revive seconds. --random=N draws N kills, --gap steps apart.
--lighthouse=STEP:SECONDS also kills the lighthouse, for that long.

Prints deaths, stalls of the surviving groups, and what is wrong at the end: all groups must end with the same bits, and
each sample of the data must have been committed once. The exit code is 1 if anything is wrong.

--grid kills one rank at each place in turn, with 2 and 3 groups of 1 and 2 ranks (or as --groups, --ranks and --places
say), each in a run of its own, and prints a table. There a survivor that stalls for more than the heartbeat timeout
plus 2 s, per death, is wrong too. --timeouts=5000:10000:60000 are the defaults of the options.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed
if not Path(sys.path[0], "tests").exists():
    sys.exit(f"error: {sys.path[0]}/tests is missing; run this script from a clone of the repository")

from tests.campaigns.group_faults import GRID_PLACES, run_campaign, run_grid
from tests.support.cluster import HEARTBEAT_MS, JOIN_MS, TIMEOUT_MS
from tests.support.runs import make_corpus

os.environ.setdefault("RUST_LOG", "error")


def main() -> int:
    """Runs one campaign, or the grid; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, help="replica groups (3)")
    parser.add_argument("--ranks", type=int, help="ranks of each group (1)")
    parser.add_argument("--faults", default="", help="KIND:PLACE:STEP:GROUP:RANK, separated by commas")
    parser.add_argument("--lighthouse", default="", help="STEP:SECONDS")
    parser.add_argument("--random", type=int, default=0, help="number of kills to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=int, default=25, help="steps between two random kills")
    parser.add_argument("--revive", type=float, default=0.0, help="seconds until a dead group is started again")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that every step sleeps")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take")
    timeouts = f"{HEARTBEAT_MS}:{TIMEOUT_MS}:{JOIN_MS}"
    parser.add_argument("--timeouts", default=timeouts, help="HEARTBEAT:COLLECTIVE:JOIN, in ms")
    parser.add_argument("--grid", action="store_true", help="kill at every place")
    parser.add_argument("--places", default=",".join(GRID_PLACES), help="of the grid, separated by commas")
    options = parser.parse_args()
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the groups on the way out
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "data" / "corpus")
        run = run_grid if options.grid else run_campaign
        return run(corpus, Path(folder) / "run", options)


if __name__ == "__main__":
    sys.exit(main())
