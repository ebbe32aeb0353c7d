"""Descriptions of the checkpoints of a run, as scripts/checkpoint.py prints them."""

import time
from collections.abc import Iterator
from pathlib import Path

from torchtitan_clone.checkpoint.commit import (
    DamagedError,
    bad_steps,
    check_digest,
    check_sizes,
    committed_steps,
    finished_step,
    newest_complete_step,
    read_progress,
    step_folder,
)


def describe_steps(folder: Path, *, digests: bool) -> Iterator[tuple[str, bool]]:
    """Yields lines about all steps, oldest first, and whether each is about damage. `digests` reads every file."""
    yield f"{'step':>10}  {'saved':<16}  {'GiB':>8}  {'files':>5}  {'tokens seen':>16}  state", False
    for step in committed_steps(folder):
        where = step_folder(folder, step)
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(where.stat().st_mtime))
        try:
            manifest = check_sizes(where, step=step)
            for name in manifest.files if digests else ():
                check_digest(where, name, manifest=manifest)
        except DamagedError as error:
            yield f"{step:>10,}  {saved}  {'':>8}  {'':>5}  {'':>16}  DAMAGED: {error}", True
            continue
        numbers = f"{manifest.bytes / 2**30:>8.3f}  {len(manifest.files):>5}  {read_progress(where).tokens_seen:>16,}"
        yield f"{step:>10,}  {saved}  {numbers}  {'verified' if digests else 'whole'}", False
    for path in bad_steps(folder):
        yield f"set aside: {path.name}", False
    if step := finished_step(folder):
        yield f"the run is complete: step {step:,}", False


def describe_step(folder: Path, *, step: int | None) -> Iterator[str]:
    """Yields lines about one step, by default the latest. LookupError if there is no such step, DamagedError."""
    from torchtitan_clone.checkpoint.loading import read_index

    step = newest_complete_step(folder) if step is None else step
    if step is None or step not in committed_steps(folder):
        raise LookupError(f"{folder} has no such step; it has {committed_steps(folder)}")
    where = step_folder(folder, step)
    check_sizes(where, step=step)
    progress = read_progress(where)
    yield f"{where}: step {progress.step:,}, {progress.tokens_seen:,} tokens, {progress.skipped_steps:,} steps skipped"
    yield (where / "versions.json").read_text()
    for name, entry in sorted(read_index(where).items()):
        yield f"{name:<60}  {entry['dtype']:<5}  {entry['shape']!s:<18}  in {len(entry['parts'])}"
