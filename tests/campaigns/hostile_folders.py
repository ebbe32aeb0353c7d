"""Starts runs on folders that a stranger could have prepared, and counts what they do.

    python tests/campaigns/hostile_folders.py --count=200 --seed=1

Every run starts in a fresh process. It may refuse the folder with one error and exit code 2, fall back to an older
checkpoint with the losses of a clean resume from there, or load the same bytes as from the clean folder. A traceback, a
run longer than --timeout, a file opened outside the folder, and a wrong load are findings; the exit code is 1 if there
are any. The same seed gives the same folders.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from tests.support.hostile_checkpoints import CheckpointTarget
from tests.support.hostile_folders import run_case
from tests.support.hostile_hub import HubTarget

TARGETS = {"checkpoint": CheckpointTarget, "hub": HubTarget}


def main() -> int:
    """Runs the cases and prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of folders of each target (200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first folder (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (0)")
    parser.add_argument("--timeout", type=float, default=20, help="seconds that a run may take (20)")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="what is attacked (all)")
    parser.add_argument("--verbose", action="store_true", help="print a line for every folder")
    options = parser.parse_args()
    findings = 0
    for name in options.targets:
        findings += attack(name, options)
    return int(findings > 0)


def attack(name: str, options: argparse.Namespace) -> int:
    """Runs the cases of one target; returns the number of findings."""
    counts: Counter[tuple[str, str]] = Counter()
    findings = 0
    with tempfile.TemporaryDirectory(prefix="hostile_") as scratch:
        target = TARGETS[name](Path(scratch) / name)
        for number in range(options.first, options.first + options.count):
            with tempfile.TemporaryDirectory(prefix="case_", dir=scratch) as folder:
                case = run_case(target, Path(folder), number=number, seed=options.seed, timeout=options.timeout)
            counts[case.kind, case.finding] += 1
            findings += not case.is_good
            if options.verbose or not case.is_good:
                print(f"{name} {number:4}  {case.kind:<20} {case.damage}: {case.finding}", flush=True)
            if not case.is_good:
                print(case.output, flush=True)
    for (kind, finding), count in sorted(counts.items()):
        print(f"{name:<12} {kind:<24} {finding:<16} {count:5}")
    print(f"{name}: {options.count} folders with seed {options.seed}, {findings} findings")
    return findings


if __name__ == "__main__":
    sys.exit(main())
