"""Compares every combination of parallelisms with one device, on this machine's CPU.

    python scripts/parity.py                 all combinations
    python scripts/parity.py context ring    those with all of these words in their name

Each combination trains 5 steps in real processes. Prints the largest relative differences from plain PyTorch on one
device: of the losses, of the gradient norms, of any gradient of step 1, of any weight after the last step. The exit
code is 1 if a combination exceeds its tolerance.
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from torchtitan_clone.testing.harness import RankFailed
from torchtitan_clone.testing.parity import References, compare
from torchtitan_clone.testing.parity_matrix import all_cases
from torchtitan_clone.testing.runs import make_short_documents


def main() -> int:
    """Runs the cases that have all words in their name; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words that the name of a combination must have")
    words = parser.parse_args().words
    logging.disable()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_short_documents(Path(folder) / "data" / "corpus")
        references: References = {}
        print(f"{'combination':52}{'ranks':>6}{'loss':>10}{'norm':>10}{'gradient':>10}{'weight':>10}{'seconds':>9}")
        for number, (name, (world_size, changes)) in enumerate(all_cases().items()):
            if not all(word in name for word in words):
                continue
            start = time.perf_counter()
            run_folder = Path(folder) / str(number)
            try:
                found = compare(corpus, run_folder, world_size=world_size, references=references, **changes)
            except RankFailed as error:
                print(f"{name:52}{world_size:6} {str(error).strip().splitlines()[-1]}")
                failed.append(name)
                continue
            numbers = f"{found.loss:10.1e}{found.grad_norm:10.1e}{found.gradient:10.1e}{found.weight:10.1e}"
            mark = "" if found.is_parity else "  NOT PARITY"
            print(f"{name:52}{world_size:6}{numbers}{time.perf_counter() - start:9.1f}{mark}", flush=True)
            if not found.is_parity:
                failed.append(name)
    print(f"{len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
