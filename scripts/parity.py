"""Compares every combination of parallelisms with one device, on this machine's CPU.

    python scripts/parity.py                 all combinations
    python scripts/parity.py context ring    those with all of these words in their name
    python scripts/parity.py --sabotage      mistakes planted in some combinations, each of which must be noticed

Each combination trains 3 steps in real processes. Prints the largest relative differences from plain PyTorch on one
device: of the losses, of the gradient norms, of any gradient of step 1, of any weight after the last step. The exit
code is 1 if a combination exceeds its tolerance, or if a planted mistake does not.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed
if not Path(sys.path[0], "tests").exists():
    sys.exit(f"error: {sys.path[0]}/tests is missing; run this script from a clone of the repository")

from tests.support.harness import RankFailed
from tests.support.parity import References, compare
from tests.support.parity_matrix import all_cases
from tests.support.runs import make_short_documents
from tests.support.sabotage import MISTAKES


def planned(words: list[str], *, sabotage: bool) -> Iterator[tuple[str, str | None]]:
    """Yields the case and, where one is planted, the mistake of each comparison; first the cases without mistakes."""
    mistakes = {name: mistake.case for name, mistake in MISTAKES.items() if all(word in name for word in words)}
    chosen = [name for name in all_cases() if all(word in name for word in words)]
    yield from ((name, None) for name in (dict.fromkeys(mistakes.values()) if sabotage else chosen))
    if sabotage:
        yield from ((case, name) for name, case in mistakes.items())


def main() -> int:
    """Runs the comparisons that have all words in their name; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words that the name of a combination or mistake must have")
    parser.add_argument("--sabotage", action="store_true", help="plant mistakes")
    args = parser.parse_args()
    logging.disable()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_short_documents(Path(folder) / "data" / "corpus")
        references: References = {}
        print(f"{'combination':52}{'ranks':>6}{'loss':>10}{'norm':>10}{'gradient':>10}{'weight':>10}{'seconds':>9}")
        for number, (case, mistake) in enumerate(planned(args.words, sabotage=args.sabotage)):
            name, start = mistake or case, time.perf_counter()
            world_size, changes = all_cases()[case]
            run_folder = Path(folder) / str(number)
            try:
                (found,) = compare(
                    corpus, run_folder, [changes], world_size=world_size, references=references, mistake=mistake
                )
            except RankFailed as error:
                print(f"{name:52}{world_size:6} {str(error).strip().splitlines()[-1]}")
                failed.append(name)
                continue
            numbers = f"{found.loss:10.1e}{found.grad_norm:10.1e}{found.gradient:10.1e}{found.weight:10.1e}"
            is_expected = found.is_parity == (mistake is None)
            mark = "" if is_expected else "  NOT NOTICED" if mistake else "  NOT PARITY"
            print(f"{name:52}{world_size:6}{numbers}{time.perf_counter() - start:9.1f}{mark}", flush=True)
            if not is_expected:
                failed.append(name)
    print(f"{len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
