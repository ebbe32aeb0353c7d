"""Prints how far every combination of parallelisms is from one device, on this machine's CPU.

    python scripts/parity.py                 all combinations
    python scripts/parity.py context ring    those whose name has all of these words

Each combination trains 5 steps in real processes. Shown are the largest relative differences from plain PyTorch on one
device: of the losses, of any gradient of step 1, of any weight after the last step. Exit code 1 if one is not parity.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_clone.testing.harness import RankFailed
from torchtitan_clone.testing.parity import compare
from torchtitan_clone.testing.parity_matrix import all_cases
from torchtitan_clone.testing.runs import short_documents


def main(words: list[str]) -> int:
    """Runs the cases that have all words in their name."""
    logging.disable()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = short_documents(Path(folder) / "data" / "corpus")
        references: dict = {}
        print(f"{'combination':52}{'ranks':>6}{'loss':>10}{'gradient':>10}{'weight':>10}{'seconds':>9}")
        for number, (name, (world_size, changes)) in enumerate(all_cases().items()):
            if not all(word in name for word in words):
                continue
            start = time.perf_counter()
            place = Path(folder) / str(number)
            try:
                found = compare(corpus, place, world_size=world_size, references=references, **changes)
            except RankFailed as error:
                print(f"{name:52}{world_size:6} {str(error).strip().splitlines()[-1]}")
                failed.append(name)
                continue
            seconds = time.perf_counter() - start
            mark = "" if found.is_parity else "  NOT PARITY"
            numbers = f"{found.loss:10.1e}{found.gradient:10.1e}{found.weight:10.1e}"
            print(f"{name:52}{world_size:6}{numbers}{seconds:9.1f}{mark}", flush=True)
            if not found.is_parity:
                failed.append(name)
    print(f"{len(failed)} failed" + "".join(f"\n  {name}" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
