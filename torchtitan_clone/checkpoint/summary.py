"""Describes the checkpoints of a run, in a folder or an object store, as text, without loading tensors."""

import contextlib
import json
import time
from pathlib import Path

from torchtitan_clone.checkpoint import folder as folders
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError, Place
from torchtitan_clone.checkpoint.remote import RemoteFolder, RemoteStep
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import escape


def table_of_steps(folder: Path | RemoteFolder, *, digests: bool) -> tuple[list[str], bool]:
    """Returns one line per step, oldest first, and if all are intact: by size, with `digests` by reading every file."""
    lines = [f"{'step':>10}  {'saved':<16}  {'GiB':>8}  {'files':>5}  {'tokens seen':>16}  state"]
    are_intact = True
    steps = folders.committed_steps(folder) if isinstance(folder, Path) else folder.committed_steps()
    for step in steps:
        place = _place(folder, step=step)
        with contextlib.suppress(FileNotFoundError):  # the run has deleted it meanwhile
            try:
                columns, is_intact = _columns(place, step=step, digests=digests), True
            except CorruptCheckpointError as error:
                columns, is_intact = f"{'':>8}  {'':>5}  {'':>16}  CORRUPTED: {error}", False
            saved = place.lstat().st_mtime if isinstance(place, Path) else place.saved_at().timestamp()
            lines.append(f"{step:>10,}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(saved))}  {columns}")
            are_intact &= is_intact
    if isinstance(folder, Path):
        lines += [f"renamed because it was corrupted: {path.name}" for path in folders.corrupt_steps(folder)]
        if (step := folders.finished_step(folder)) and step >= max(steps, default=0):
            lines.append(f"the run is complete: step {step:,}")
    return lines, are_intact


def _place(folder: Path | RemoteFolder, *, step: int) -> "Path | RemoteStep":
    return folders.step_folder(folder, step) if isinstance(folder, Path) else folder.step(step)


def _columns(path: Place, *, step: int, digests: bool) -> str:
    manifest = folders.check_sizes(path, step=step)
    if digests:
        from torchtitan_clone.checkpoint.load import verify  # imports torch

        verify(path, step=step, digests=True)
        for name in manifest.files if not isinstance(path, Path) else ():
            folders.check_digest(path, name, manifest=manifest)
    tokens = folders.read_progress(path, manifest=manifest).tokens_seen
    gib = sum(record.bytes for record in manifest.files.values()) / 2**30
    state = "verified" if digests else "complete"
    return f"{gib:>8.3f}  {len(manifest.files):>5}  {tokens:>16,}  {state}"


def describe_step(folder: Path | RemoteFolder, *, step: int | None) -> list[str]:
    """Returns the progress, versions and tensors of a step, by default the newest; ConfigError if it is not intact."""
    from torchtitan_clone.checkpoint.format import read_index  # imports torch

    wanted = choose_step(folder, step=step)
    path = _place(folder, step=wanted)
    try:
        manifest = folders.check_sizes(path, step=wanted)
        progress = folders.read_progress(path, manifest=manifest)
        index = read_index(path, manifest=manifest)
        has_versions = folders.VERSIONS_FILE in manifest.files  # a converted checkpoint has none
        versions = folders.read_document(path, folders.VERSIONS_FILE, manifest=manifest).value if has_versions else {}
    except CorruptCheckpointError as error:
        raise ConfigError(f"step {wanted} is corrupted: {error}; choose another one with --step") from None
    counts = f"{progress.tokens_seen:,} tokens, {progress.skipped_steps:,} steps skipped"
    return [f"{path}: step {progress.step:,}, {counts}", json.dumps(versions, indent=1)] + [
        f"{escape(name):<60}  {str(saved.dtype)[6:]:<13}  {list(saved.shape)!s:<18}  in {len(saved.shards)} shards"
        for name, saved in sorted(index.items())
    ]


def choose_step(folder: Path | RemoteFolder, *, step: int | None) -> int:
    """Returns a step that a folder or a store has, by default the newest complete one; ConfigError without it."""
    if isinstance(folder, Path):
        steps, newest = folders.committed_steps(folder), folders.newest_complete_step(folder)
    else:
        found = folder.newest_complete_step()
        steps, newest = folder.committed_steps(), None if found is None else found.manifest.step
    wanted = newest if step is None else step
    if wanted is None or wanted not in steps:
        missing = "complete step" if wanted is None else f"step {wanted}"
        available = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"{folder} has no {missing}; its steps: {available}; choose one of them with --step")
    return wanted
