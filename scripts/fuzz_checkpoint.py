"""Kills ranks and writers at random moments of their saves, and checks that nothing was lost.

    python scripts/fuzz_checkpoint.py --count=120 --seed=1

A run of 1 to 3 ranks saves step after step, in one of the three modes, while its state changes in place as an optimizer
changes it; all values of a step identify the save. After a random time a rank, a writer (SIGKILL or SIGSTOP) or every
process is killed, and then the others. Afterwards a run on another number of ranks resumes from the folder:
- it finds a step, unless none was reported as committed;
- all values on all ranks are those of one save, whose number stands in progress.json;
- that save is not older than the last one that was reported as committed.
In some runs every save is one of step 1, and replaces the save before.
The same seed gives the same choices, but not the same moments. The exit code is 1 if anything was lost.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed
if not Path(sys.path[0], "tests").exists():
    sys.exit(f"error: {sys.path[0]}/tests is missing; run this script from a clone of the repository")

from tests.campaigns.checkpoint_fuzz import MODES, Case, run_case


def main() -> int:
    """Runs the cases and prints a summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="number of runs (120)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (0)")
    parser.add_argument("--verbose", action="store_true", help="print a line for every run")
    options = parser.parse_args()
    source = random.Random(options.seed)
    failures: list[int] = []
    kinds: Counter[tuple[str, str]] = Counter()
    for number in range(options.count):
        case = Case.draw(source, mode=MODES[number % len(MODES)])
        with tempfile.TemporaryDirectory(prefix="fuzz_checkpoint_") as folder:
            reported, found, error = run_case(case, Path(folder))
        kinds[case.mode, case.victim] += 1
        if options.verbose or error:
            print(f"{number:4} {case}: reported {reported}, found {found}: {error or 'ok'}", flush=True)
        if error:
            failures.append(number)
    for (mode, victim), count in sorted(kinds.items()):
        print(f"{mode:<22} {victim:<14} {count:4} runs")
    print(f"{options.count} runs with seed {options.seed}, {len(failures)} with a loss: {failures}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
