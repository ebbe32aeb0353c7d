"""Lists, verifies, shows and deletes the checkpoints of a run.

    python scripts/checkpoint.py list outputs/debug_model/checkpoint
    python scripts/checkpoint.py verify outputs/debug_model/checkpoint
    python scripts/checkpoint.py show outputs/debug_model/checkpoint --step=150
    python scripts/checkpoint.py prune outputs/debug_model/checkpoint --keep_latest_k=1 --keep_every=1000

`list` checks file sizes; `verify` reads every file and changes nothing. Their exit code is 1 if a step is damaged.
`prune` deletes complete steps except the latest ones; --bad also deletes steps that were renamed because of damage.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from torchtitan_clone.checkpoint.commit import DamagedError, bad_steps, purge
from torchtitan_clone.checkpoint.describe import describe_step, describe_steps


def main() -> int:
    """Runs one action; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "verify", "show", "prune"])
    parser.add_argument("folder", type=Path, help="the folder that holds step-N")
    parser.add_argument("--step", type=int, help="show: which step; by default the latest complete one")
    parser.add_argument("--keep_latest_k", type=int, default=10, help="prune: number of latest complete steps to keep")
    parser.add_argument("--keep_every", type=int, default=0, help="prune: also keep steps divisible by this")
    parser.add_argument("--bad", action="store_true", help="prune: delete steps that were renamed because of damage")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: there is no such folder")
    if options.action == "prune" and options.keep_latest_k < 1:
        parser.error("--keep_latest_k: must be at least 1, the latest step is always kept")
    if options.action == "prune":
        return prune(options)
    if options.action == "show":
        return show(options)
    is_damaged = False
    for line, tells_damage in describe_steps(options.folder, digests=options.action == "verify"):
        print(line, flush=True)
        is_damaged |= tells_damage
    return int(is_damaged)


def show(options: argparse.Namespace) -> int:
    """Prints what is in one step."""
    try:
        for line in describe_step(options.folder, step=options.step):
            print(line)
    except (DamagedError, LookupError) as error:
        print(f"{'DAMAGED: ' if isinstance(error, DamagedError) else ''}{error}")
        return 1
    return 0


def prune(options: argparse.Namespace) -> int:
    """Deletes steps, and prints which."""
    for step in purge(options.folder, keep_latest_k=options.keep_latest_k, keep_every=options.keep_every):
        print(f"deleted step {step:,}")
    for path in bad_steps(options.folder) if options.bad else ():
        shutil.rmtree(path)
        print(f"deleted {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
