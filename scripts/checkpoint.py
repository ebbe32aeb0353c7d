"""Lists, verifies, shows and deletes the checkpoints of a run.

    python scripts/checkpoint.py list outputs/debug_model/checkpoint
    python scripts/checkpoint.py verify outputs/debug_model/checkpoint
    python scripts/checkpoint.py show outputs/debug_model/checkpoint --step=150
    python scripts/checkpoint.py prune outputs/debug_model/checkpoint --keep_latest_k=1 --keep_every=1000

`list` compares file sizes; `verify` reads every file and exits with code 1 if a step is corrupted. `prune` deletes
complete steps other than the newest ones and, with --bad, the folders that were renamed because they were corrupted.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from torchtitan_clone.checkpoint.folder import corrupt_steps, purge
from torchtitan_clone.checkpoint.summary import describe_step, table_of_steps
from torchtitan_clone.observe.outputs import reports_errors


@reports_errors
def main() -> int:
    """Parses the command line and runs the action; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "verify", "show", "prune"])
    parser.add_argument("folder", type=Path, help="folder that contains step-N folders")
    parser.add_argument("--step", type=int, help="show: the step (default: the newest complete one)")
    parser.add_argument("--keep_latest_k", type=int, default=10, help="prune: number of newest steps to keep")
    parser.add_argument("--keep_every", type=int, default=0, help="prune: also keep steps divisible by this")
    parser.add_argument("--bad", action="store_true", help="prune: also delete folders of corrupted steps")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: no such folder; give the folder that contains step-N folders")
    if options.step is not None and options.action != "show":
        parser.error(f"--step={options.step}: is for show; {options.action} takes all steps, leave it out")
    if options.keep_every < 0:
        parser.error(f"--keep_every={options.keep_every}: must be at least 0, which keeps none of them")
    if not any(options.folder.glob("step-*")):
        parser.error(f"{options.folder}: has no step-N folder; give that of the checkpoints, as outputs/RUN/checkpoint")
    if options.action == "prune" and options.keep_latest_k < 1:
        parser.error(f"--keep_latest_k={options.keep_latest_k}: must be at least 1, so that the newest step is kept")
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit code."""
    if options.action == "prune":
        prune(options)
        return 0
    if options.action == "show":
        lines, are_intact = describe_step(options.folder, step=options.step), True
    else:
        lines, are_intact = table_of_steps(options.folder, digests=options.action == "verify")
    print(*lines, sep="\n")
    return int(not are_intact)


def prune(options: argparse.Namespace) -> None:
    """Deletes checkpoints and prints which."""
    for step in purge(options.folder, keep_latest_k=options.keep_latest_k, keep_every=options.keep_every):
        print(f"deleted step {step:,}")
    for path in corrupt_steps(options.folder) if options.bad else ():
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
        print(f"deleted {path.name}")


if __name__ == "__main__":
    sys.exit(main())
