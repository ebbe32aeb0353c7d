"""Looks after the checkpoints of a run.

    python scripts/checkpoint.py list outputs/debug_model/checkpoint
    python scripts/checkpoint.py verify outputs/debug_model/checkpoint
    python scripts/checkpoint.py show outputs/debug_model/checkpoint --step=150
    python scripts/checkpoint.py prune outputs/debug_model/checkpoint --keep_latest_k=1 --keep_every=1000

`list` looks at sizes, `verify` reads everything and changes nothing; its exit code is 1 where a step is damaged.
`prune` deletes whole steps beyond the newest ones, and with --bad what was set aside as damaged.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from torchtitan_clone.checkpoint.commit import (
    DamagedError,
    bad_steps,
    check_digest,
    check_sizes,
    committed_steps,
    finished_step,
    newest_complete_step,
    purge,
    read_progress,
    step_folder,
)


def main() -> int:
    """Parse, and do what is asked; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "verify", "show", "prune"])
    parser.add_argument("folder", type=Path, help="the folder that holds step-N")
    parser.add_argument("--step", type=int, help="show: which step; default: the newest whole one")
    parser.add_argument("--keep_latest_k", type=int, default=10, help="prune: newest whole steps that stay")
    parser.add_argument("--keep_every", type=int, default=0, help="prune: steps divisible by this stay too")
    parser.add_argument("--bad", action="store_true", help="prune: delete what was set aside as damaged")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder}: there is no such folder")
    if options.action == "prune" and options.keep_latest_k < 1:
        parser.error("--keep_latest_k: at least 1, the newest step always stays")
    if options.action == "show":
        return show(options.folder, step=options.step)
    if options.action == "prune":
        return prune(options)
    return table(options.folder, digests=options.action == "verify")


def table(folder: Path, *, digests: bool) -> int:
    """A line a step, oldest first; 1 where one is damaged."""
    print(f"{'step':>10}  {'saved':<16}  {'GiB':>8}  {'files':>5}  {'tokens seen':>16}  state")
    damaged = False
    for step in committed_steps(folder):
        where = step_folder(folder, step)
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(where.stat().st_mtime))
        try:
            manifest = check_sizes(where, step=step)
            for name in manifest.files if digests else ():
                check_digest(where, name, manifest=manifest)
        except DamagedError as error:
            damaged = True
            print(f"{step:>10,}  {saved}  {'':>8}  {'':>5}  {'':>16}  DAMAGED: {error}")
            continue
        numbers = f"{manifest.bytes / 2**30:>8.3f}  {len(manifest.files):>5}  {read_progress(where).tokens_seen:>16,}"
        print(f"{step:>10,}  {saved}  {numbers}  {'verified' if digests else 'whole'}")
    for path in bad_steps(folder):
        print(f"set aside: {path.name}")
    if step := finished_step(folder):
        print(f"the run is complete: step {step:,}")
    return int(damaged)


def show(folder: Path, *, step: int | None) -> int:
    """What is in one step."""
    from torchtitan_clone.checkpoint.loading import read_index

    step = newest_complete_step(folder) if step is None else step
    if step is None or step not in committed_steps(folder):
        print(f"{folder} has no such step; it has {committed_steps(folder)}")
        return 1
    where = step_folder(folder, step)
    try:
        check_sizes(where, step=step)
        progress, index = read_progress(where), read_index(where)
    except DamagedError as error:
        print(f"step {step}: DAMAGED: {error}")
        return 1
    print(f"{where}: step {progress.step:,}, {progress.tokens_seen:,} tokens, {progress.skipped_steps:,} steps skipped")
    print((where / "versions.json").read_text())
    for name, entry in sorted(index.items()):
        print(f"{name:<60}  {entry['dtype']:<5}  {entry['shape']!s:<18}  in {len(entry['parts'])}")
    return 0


def prune(options: argparse.Namespace) -> int:
    """Deletes, and says what."""
    for step in purge(options.folder, keep_latest_k=options.keep_latest_k, keep_every=options.keep_every):
        print(f"deleted step {step:,}")
    for path in bad_steps(options.folder) if options.bad else ():
        shutil.rmtree(path)
        print(f"deleted {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
