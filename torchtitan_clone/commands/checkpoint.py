"""Lists, verifies, shows, deletes and copies the checkpoints of a run, in a folder or an object store.

    python scripts/checkpoint.py list outputs/debug_model/checkpoint
    python scripts/checkpoint.py verify s3://my-bucket/runs/first
    python scripts/checkpoint.py show outputs/debug_model/checkpoint --step=150
    python scripts/checkpoint.py prune outputs/debug_model/checkpoint --keep_latest_k=1 --keep_every=1000
    python scripts/checkpoint.py copy s3://my-bucket/runs/first my_copy --step=150

`list` compares file sizes; `verify` reads every file and exits with code 1 if a step is corrupted. `prune` deletes
complete steps other than the newest ones and, with --bad, the folders that were renamed because they were corrupted.
`copy` copies a step between a folder and a store, or two stores.
"""

import argparse
import shutil
from pathlib import Path

from torchtitan_clone.checkpoint.copying import copy_step, open_place
from torchtitan_clone.checkpoint.folder import corrupt_steps, purge
from torchtitan_clone.checkpoint.remote import RemoteFolder
from torchtitan_clone.checkpoint.summary import describe_step, table_of_steps
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.observe.outputs import reports_errors


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and runs the action; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("action", choices=["list", "verify", "show", "prune", "copy"])
    parser.add_argument("folder", help="folder that contains step-N folders, or the URL of an object store")
    parser.add_argument("target", nargs="?", help="copy: the folder or the URL that gets the step")
    parser.add_argument("--step", type=int, help="show, copy: the step (default: the newest complete one)")
    parser.add_argument("--keep_latest_k", type=int, default=10, help="prune: number of newest steps to keep")
    parser.add_argument("--keep_every", type=int, default=0, help="prune: also keep steps divisible by this")
    parser.add_argument("--bad", action="store_true", help="prune: also delete folders of corrupted steps")
    options = parser.parse_args(words)
    folder = open_place(options.folder)
    if isinstance(folder, Path) and not folder.is_dir():
        parser.error(f"{folder}: no such folder; give the folder that contains step-N folders")
    if options.step is not None and options.action not in ("show", "copy"):
        parser.error(f"--step={options.step}: is for show and copy; {options.action} takes all steps, leave it out")
    if options.bad and not isinstance(folder, Path):
        rule = "is for folders, where corrupted steps are renamed; a store keeps them until the step is deleted"
        parser.error(f"--bad: {rule}; leave it out, or delete the objects of the step by hand")
    if (options.action == "copy") != (options.target is not None):
        parser.error("copy takes two places, as SOURCE TARGET, and every other action one")
    if options.keep_every < 0:
        parser.error(f"--keep_every={options.keep_every}: must be at least 0, which keeps none of them")
    if isinstance(folder, Path) and not any(folder.glob("step-*")):
        parser.error(f"{folder}: has no step-N folder; give that of the checkpoints, as outputs/RUN/checkpoint")
    if options.action == "prune" and options.keep_latest_k < 1:
        parser.error(f"--keep_latest_k={options.keep_latest_k}: must be at least 1, so that the newest step is kept")
    if options.action in ("list", "verify"):
        lines, are_intact = table_of_steps(folder, digests=options.action == "verify")
    else:
        lines, are_intact = run(options, folder=folder), True
    print(*lines, sep="\n")
    return int(not are_intact)


def run(options: argparse.Namespace, *, folder: Path | RemoteFolder) -> list[str]:
    """Shows, copies or deletes; returns the lines to print."""
    if options.action == "show":
        return describe_step(folder, step=options.step)
    if options.action == "copy":
        return [f"copied step {copy_step(folder, open_place(options.target), step=options.step):,}"]
    keep = {"keep_latest_k": options.keep_latest_k, "keep_every": options.keep_every}
    steps = purge(folder, **keep) if isinstance(folder, Path) else folder.purge(**keep)
    bad = corrupt_steps(folder) if options.bad and isinstance(folder, Path) else []
    for path in bad:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    return [*(f"deleted step {step:,}" for step in steps), *(f"deleted {path.name}" for path in bad)]
