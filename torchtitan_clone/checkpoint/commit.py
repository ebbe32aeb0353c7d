"""Checkpoint folders on disk, without torch. step-N is committed: renamed to this after its manifest was written.

The suffix .partial-ID: being written, or left behind by a killed process; .bad-REASON: corrupted; .left-REASON: newer
than load_step; .replaced: the older of two saves of one step, while they are exchanged; .purged: being deleted.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchtitan_clone.checkpoint.writer import DIGEST, DIGESTS, FileRecord, digest_of_file, write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.files import sync_folder, write_atomically

logger = logging.getLogger("torchtitan_clone")

MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "progress.json"
_FINISHED_FILE = "finished.json"
_FORMAT = 1
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class CorruptCheckpointError(Exception):
    """A checkpoint does not match its manifest, or has none; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a run apart from its tensors; `data` is the position in the data."""

    step: int
    tokens_seen: int
    skipped_steps: int
    data: Mapping[str, object]


NOTHING_DONE = Progress(step=0, tokens_seen=0, skipped_steps=0, data={})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of one committed step; `algorithm` is that of their digests."""

    step: int
    algorithm: str
    files: Mapping[str, FileRecord]


def step_folder(folder: Path, step: int) -> Path:
    """Returns the folder of a committed step."""
    return folder / f"step-{step}"


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps that were committed, oldest first; their files may have been damaged since."""
    if not folder.is_dir():
        return []
    matches = [re.fullmatch(r"step-(\d+)", entry.name) for entry in folder.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def corrupt_steps(folder: Path) -> list[Path]:
    """Returns the folders that were renamed because they were corrupted."""
    return sorted(folder.glob("step-*.bad-*"))


def newest_complete_step(folder: Path) -> int | None:
    """Returns the newest step whose files have the recorded sizes, or None. Changes nothing."""
    return next((step for step in reversed(committed_steps(folder)) if is_complete(folder, step=step)), None)


def expected_progress(checkpoint: Checkpoint, *, folder: Path) -> Progress | None:
    """Returns the progress that a run resumes from if all digests match: that of load_step or the newest step."""
    if not checkpoint.enable:
        return None
    restore_replaced(folder)
    step = newest_complete_step(folder) if checkpoint.load_step == -1 else checkpoint.load_step
    if step is None or not is_complete(folder, step=step):
        return None
    return progress_to_resume(step_folder(folder, step), checkpoint=checkpoint)


def initial_folder(checkpoint: Checkpoint) -> tuple[Path, int | None] | None:
    """Returns initial_load_path, if set, and the step in a folder of several; ConfigError if it is not a checkpoint."""
    if not checkpoint.initial_load_path or checkpoint.initial_load_in_hf:
        return None
    folder = Path(checkpoint.initial_load_path)
    step = newest_complete_step(folder)
    found = folder if step is None else step_folder(folder, step)
    if not (found / MANIFEST_FILE).exists():
        raise ConfigError(
            f"checkpoint.initial_load_path = {folder}: it is not a checkpoint, because it has no {MANIFEST_FILE}; give "
            "a step-N folder or a folder of them, or for Hugging Face weights set checkpoint.initial_load_in_hf = true"
        )
    return found, step


def progress_to_resume(folder: Path, *, checkpoint: Checkpoint) -> Progress:
    """Returns the progress of a checkpoint, without the data position if exclude_from_loading lists "data"."""
    progress = read_progress(folder)
    return replace(progress, data={}) if "data" in checkpoint.exclude_from_loading else progress


def is_complete(folder: Path, *, step: int) -> bool:
    """Returns whether all files of a step have the recorded sizes, and its manifest and progress are intact."""
    try:
        check_sizes(step_folder(folder, step), step=step)
    except CorruptCheckpointError:
        return False
    return True


def write_manifest(folder: Path, *, step: int, files: Mapping[str, FileRecord]) -> None:
    """Writes the last file of a checkpoint, after which its content is final."""
    records = {name: asdict(record) for name, record in files.items()}
    content = {"format": _FORMAT, "step": step, "algorithm": DIGEST, "files": records}
    text = json.dumps({"manifest": content, "digest": _digest_of(content, algorithm=DIGEST)}, indent=1)
    write_file(folder / MANIFEST_FILE, [text.encode()])
    sync_folder(folder)


def read_manifest(folder: Path, *, step: int | None = None) -> Manifest:
    """Returns the manifest of a checkpoint; CorruptCheckpointError if it is missing, invalid or of another step."""
    try:
        content_and_digest = json.loads((folder / MANIFEST_FILE).read_bytes())
        content = content_and_digest["manifest"]
        algorithm = content["algorithm"]
        is_known = algorithm in DIGESTS
        is_intact = not is_known or content_and_digest["digest"] == _digest_of(content, algorithm=algorithm)
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        files[PROGRESS_FILE]  # every checkpoint has one
        manifest = Manifest(step=content["step"], algorithm=algorithm, files=files)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{MANIFEST_FILE} is missing") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptCheckpointError(f"{MANIFEST_FILE} is not a valid manifest") from None
    if not is_intact:
        raise CorruptCheckpointError(f"{MANIFEST_FILE} does not match its own digest")
    if not is_known:
        raise ConfigError(f"{folder} was written with {algorithm} digests, which need a package: pip install xxhash")
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{MANIFEST_FILE} belongs to step {manifest.step}")
    return manifest


def check_sizes(folder: Path, *, step: int | None = None) -> Manifest:
    """Returns the manifest; CorruptCheckpointError if a file has another size or the progress is not intact."""
    manifest = read_manifest(folder, step=step)
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CorruptCheckpointError(f"{name} is missing") from None
        if size != record.bytes:
            raise CorruptCheckpointError(f"{name} has {size:,} bytes instead of {record.bytes:,}")
    check_digest(folder, PROGRESS_FILE, manifest=manifest)
    read_progress(folder)
    return manifest


def check_digest(folder: Path, name: str, *, manifest: Manifest) -> None:
    """Reads a file; CorruptCheckpointError if it does not match its digest in the manifest."""
    try:
        found = digest_of_file(folder / name, name=manifest.algorithm)
    except OSError as error:
        raise CorruptCheckpointError(f"{name} cannot be read: {error.strerror}") from None
    if found != manifest.files[name].digest:
        raise CorruptCheckpointError(f"{name} does not match its digest in the manifest")


def read_progress(folder: Path) -> Progress:
    """Returns the progress of a checkpoint; CorruptCheckpointError if it cannot be read."""
    try:
        return Progress(**json.loads((folder / PROGRESS_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"{PROGRESS_FILE} cannot be read: {error}") from None


def commit(partial: Path, final: Path) -> None:
    """Renames a complete folder to its final name; replaces an older folder of that name atomically if possible."""
    sync_folder(partial)
    if final.exists():
        _replace(partial, final)
    else:
        partial.rename(final)
    sync_folder(final.parent)


def _replace(partial: Path, final: Path) -> None:
    """Exchanges two names; without file system support by two renames, which `restore_replaced` can complete."""
    old = final.with_name(f"{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    arguments = (_AT_FDCWD, os.fsencode(partial), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE)
    if rename is not None and rename(*arguments) == 0:
        partial.rename(old)
    else:
        final.rename(old)
        partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Restores steps that a killed process was replacing. Any process may call it."""
    for old in folder.glob("step-*.replaced"):
        final = old.with_name(old.name.removesuffix(".replaced"))
        if not final.exists():
            old.rename(final)


def delete_leftovers(folder: Path) -> None:
    """Deletes what killed processes left behind. One process of a run calls it, before the first save."""
    for entry in folder.glob("step-*.*"):
        if re.fullmatch(r"step-\d+\.(partial-.*|replaced|purged)", entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def quarantine(folder: Path, *, step: int, suffix: str, reason: str) -> Path:
    """Renames a step, so that it no longer counts as a checkpoint; returns its new path."""
    name = f"step-{step}.{suffix}-{re.sub(r'[^A-Za-z0-9]+', '-', reason).strip('-')}"
    names = (folder / f"{name}{number}" for number in ("", *(f"-{again}" for again in range(2, 1000))))
    target = next(path for path in names if not path.exists())
    with contextlib.suppress(FileNotFoundError):  # another replica group has renamed it
        step_folder(folder, step).rename(target)
    sync_folder(folder)
    return target


def purge(folder: Path, *, keep_latest_k: int, keep_every: int) -> list[int]:
    """Deletes and returns complete steps except the newest `keep_latest_k` (0: all) and multiples of `keep_every`."""
    complete = [step for step in committed_steps(folder) if is_complete(folder, step=step)]
    old = complete[:-keep_latest_k] if keep_latest_k else []
    purged = [step for step in old if not (keep_every and step % keep_every == 0)]
    for step in purged:
        shutil.rmtree(step_folder(folder, step).rename(folder / f"step-{step}.purged"), ignore_errors=True)
    return purged


def mark_finished(folder: Path, *, step: int) -> None:
    """Records that the run is complete."""
    write_atomically(folder / _FINISHED_FILE, json.dumps({"step": step}).encode())


def finished_step(folder: Path) -> int:
    """Returns the last step of a complete run; 0 if the run is not complete."""
    try:
        return json.loads((folder / _FINISHED_FILE).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _digest_of(content: Mapping[str, object], *, algorithm: str) -> str:
    digest = DIGESTS[algorithm]()
    digest.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return digest.hexdigest()
