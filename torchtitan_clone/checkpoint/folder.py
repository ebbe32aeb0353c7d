"""Checkpoint folders on disk, without torch. A step is committed by a rename, after its manifest was written.

step-N.partial-ID        being written, or left behind by a killed process; .partial-GROUP-ID of a replica group
  -> step-N              committed
       -> .replaced      the older of two saves of one step, while they are exchanged
       -> .bad-REASON    corrupted
       -> .left-REASON   newer than the step that the run was rewound to
       -> .purged        being deleted
"""

import contextlib
import ctypes
import json
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Protocol

from torchtitan_clone.checkpoint.progress import MAX_DIGITS, Progress, parse_progress
from torchtitan_clone.checkpoint.writer import ALGORITHMS, DIGEST, DIGESTS, Bytes, FileRecord, digest_of, write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.downloads import describe_download
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import (
    MAX_BYTES,
    DocumentError,
    Value,
    is_plain_name,
    open_regular,
    parse_json,
    read_json,
    read_regular,
)
from torchtitan_clone.files import sync_folder, write_atomically

logger = logging.getLogger("torchtitan_clone")

CONFIG_FILE = "config.toml"
MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "progress.json"
VERSIONS_FILE = "versions.json"
MODEL_ONLY_FOLDER = "model_only"
_FINISHED_FILE = "finished.json"
REWIND_FILE = "rewind.json"
STEP_NAME = rf"step-(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_FORMAT = 1
_MAX_REASON = 100  # characters in the name of a folder
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of one committed step; `algorithm` is that of their digests."""

    step: int
    algorithm: str
    files: Mapping[str, FileRecord]


class StoredStep(Protocol):
    """A step in an object store, where functions of this package take it in place of a folder; errors as there."""

    name: str

    def read(self, name: str, *, max_bytes: int) -> bytes: ...
    def open(self, name: str) -> RawIOBase: ...
    def check_sizes(self) -> Manifest: ...


Place = Path | StoredStep
"""Where the files of a step are."""


class CorruptCheckpointError(Exception):
    """A checkpoint does not match its manifest, or has none; the message names the file."""


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns errors about a file of a checkpoint into CorruptCheckpointError, but not what may pass, such as EIO."""
    try:
        yield
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{name} is missing") from None
    except (NotADirectoryError, IsADirectoryError) as error:
        raise CorruptCheckpointError(f"{name} cannot be read: {error.strerror}") from None
    except DocumentError as error:
        raise CorruptCheckpointError(str(error)) from None


def step_folder(folder: Path, step: int) -> Path:
    """Returns the folder of a committed step."""
    return folder / f"step-{step}"


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps that were committed, oldest first; they may have been damaged since, and be no folder."""
    if not folder.is_dir():
        return []
    matches = [re.fullmatch(STEP_NAME, entry.name) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def corrupt_steps(folder: Path) -> list[Path]:
    """Returns the folders that were renamed because they were corrupted."""
    return sorted(folder.glob("step-*.bad-*"))


def newest_complete_step(folder: Path, *, below: float = math.inf) -> int | None:
    """Returns the newest step below a number whose files have the recorded sizes, or None. Changes nothing."""
    steps = (step for step in reversed(committed_steps(folder)) if step < below)
    return next((step for step in steps if is_complete(folder, step=step)), None)


def steps_to_resume(steps: list[int], *, folder: Path, checkpoint: Checkpoint, identity: str) -> list[int]:
    """Returns those of `steps` that a run may resume from; `identity` is text that tells it from other runs.

    With load_step these are that step and, if this run was rewound to it before, the later ones.
    """
    first = checkpoint.load_step
    if first == -1:
        return steps
    last = steps[-1] if steps and _was_rewound(folder, step=first, identity=identity) else first
    return [step for step in steps if first <= step <= last]


def _was_rewound(folder: Path, *, step: int, identity: str) -> bool:
    try:
        record = read_json(folder / REWIND_FILE).table("step", "run")
        return record["step"].integer() == step and record["run"].text() == _digest_of(identity, algorithm=DIGEST)
    except (OSError, DocumentError):
        return False


def record_rewind(folder: Path, *, checkpoint: Checkpoint, identity: str) -> None:
    """Records the step that load_step rewinds this run to, -1 for none; only warns if it cannot."""
    record = {"step": checkpoint.load_step, "run": _digest_of(identity, algorithm=DIGEST)}
    file = folder / REWIND_FILE
    try:
        if checkpoint.load_step == -1:
            file.unlink(missing_ok=True)
        else:
            write_atomically(file, json.dumps(record).encode())
    except OSError as error:
        text = "%s cannot be written: %s; started again with checkpoint.load_step, the run resumes from that step again"
        logger.warning(text, file, error.strerror)


def expected_progress(checkpoint: Checkpoint, *, folder: Path, identity: str) -> Progress | None:
    """Returns the progress of the newest step that a run resumes from if all digests match."""
    if not checkpoint.enable:
        return None
    restore_replaced(folder)
    steps = steps_to_resume(committed_steps(folder), folder=folder, checkpoint=checkpoint, identity=identity)
    for step in reversed(steps):
        with contextlib.suppress(CorruptCheckpointError, OSError):
            check_sizes(step_folder(folder, step), step=step)
            return progress_to_resume(step_folder(folder, step), checkpoint=checkpoint)
    return None


def initial_folder(checkpoint: Checkpoint) -> tuple[Path, int | None] | None:
    """Returns initial_load_path, if set, and the step in a folder of several; ConfigError if it is not a checkpoint."""
    if not checkpoint.initial_load_path or checkpoint.initial_load_in_hf:
        return None
    folder = Path(checkpoint.initial_load_path)
    if not folder.exists():
        hint = describe_download(str(folder), repository="model")
        in_hf = f"{hint}, and set checkpoint.initial_load_in_hf = true"
        remedy = in_hf if hint else "; give a step-N folder or a folder of them"
        raise ConfigError(f"checkpoint.initial_load_path = {folder}: there is no such folder{remedy}")
    step = newest_complete_step(folder)
    source = folder if step is None else step_folder(folder, step)
    if not (source / MANIFEST_FILE).exists():
        raise ConfigError(
            f"checkpoint.initial_load_path = {folder}: it is not a checkpoint, because it has no {MANIFEST_FILE}; give "
            "a step-N folder or a folder of them, or for Hugging Face weights set checkpoint.initial_load_in_hf = true"
        )
    return source, step


def progress_to_resume(folder: Place, *, checkpoint: Checkpoint) -> Progress:
    """Returns the progress of a checkpoint, without the data position if exclude_from_loading lists "data"."""
    progress = read_progress(folder)
    return replace(progress, data={}) if "data" in checkpoint.exclude_from_loading else progress


def is_complete(folder: Path, *, step: int) -> bool:
    """Returns whether all files of a step have the recorded sizes, and its manifest and progress are intact."""
    try:
        check_sizes(step_folder(folder, step), step=step)
    except (CorruptCheckpointError, OSError):
        return False
    return True


def write_manifest(folder: Path, *, step: int, files: Mapping[str, FileRecord]) -> None:
    """Writes the last file of a checkpoint, after which its content is final."""
    write_file(folder / MANIFEST_FILE, [encode_manifest(Manifest(step=step, algorithm=DIGEST, files=files))])
    sync_folder(folder)


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the content of manifest.json."""
    records = {name: asdict(record) for name, record in manifest.files.items()}
    content = {"format": _FORMAT, "step": manifest.step, "algorithm": manifest.algorithm, "files": records}
    digest = _digest_of(content, algorithm=manifest.algorithm)
    return json.dumps({"manifest": content, "digest": digest}, indent=1).encode()


def read_file(place: Place, name: str, *, max_bytes: int) -> bytes:
    """Returns the content of a file of a step; DocumentError if it is larger or no regular file."""
    if isinstance(place, Path):
        return read_regular(place / name, max_bytes=max_bytes)
    return place.read(name, max_bytes=max_bytes)


def open_file(place: Place, name: str) -> BufferedReader:
    """Opens a file of a step for reading; what comes from a store is verified as it is read."""
    return BufferedReader(open_regular(place / name) if isinstance(place, Path) else place.open(name))


def read_manifest(folder: Place, *, step: int | None = None) -> Manifest:
    """Returns the manifest of a checkpoint; CorruptCheckpointError if it is missing, invalid or of another step."""
    with reading(MANIFEST_FILE):
        content = read_file(folder, MANIFEST_FILE, max_bytes=MAX_BYTES)
        document = parse_json(content, where=MANIFEST_FILE).table("manifest", "digest")
        manifest = _parse_manifest(document["manifest"])
    if manifest.algorithm not in DIGESTS:
        raise ConfigError(
            f"{folder} was written with {manifest.algorithm} digests, which need a package: pip install xxhash"
        )
    if document["digest"].value != _digest_of(document["manifest"].value, algorithm=manifest.algorithm):
        raise CorruptCheckpointError(f"{MANIFEST_FILE} does not match its own digest")
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{MANIFEST_FILE} belongs to step {manifest.step}")
    return manifest


def _parse_manifest(value: Value) -> Manifest:
    content = value.table("format", "step", "algorithm", "files")
    content["format"].integer(low=_FORMAT, high=_FORMAT)
    files: dict[str, FileRecord] = {}
    for name, each in content["files"].entries().items():
        if not is_plain_name(name) or name == MANIFEST_FILE:
            each.refuse("its key must be the plain name of another file in the same folder")
        record = each.table("bytes", "digest")
        files[name] = FileRecord(bytes=record["bytes"].integer(), digest=record["digest"].text())
    if PROGRESS_FILE not in files:
        content["files"].refuse(f"must list {PROGRESS_FILE}")
    step = content["step"].integer(high=10**MAX_DIGITS - 1)
    return Manifest(step=step, algorithm=content["algorithm"].choice(*ALGORITHMS), files=files)


def check_sizes(folder: Place, *, step: int | None = None) -> Manifest:
    """Returns the manifest; CorruptCheckpointError if a file has another size or the progress is not intact."""
    if not isinstance(folder, Path):
        return folder.check_sizes()
    if step is not None and folder.is_symlink():
        raise CorruptCheckpointError(f"{folder.name} is a link and not a folder")
    manifest = read_manifest(folder, step=step)
    for name, record in manifest.files.items():
        with reading(name):
            status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(f"{name} is not a regular file")
        if status.st_size != record.bytes:
            raise CorruptCheckpointError(f"{name} has {status.st_size:,} bytes instead of {record.bytes:,}")
    read_progress(folder, manifest=manifest)
    return manifest


def check_digest(folder: Place, name: str, *, manifest: Manifest) -> None:
    """Reads a file; CorruptCheckpointError if it does not match its digest in the manifest."""
    with reading(name), open_file(folder, name) as file:
        digest = digest_of(file, name=manifest.algorithm)
    if digest != manifest.files[name].digest:
        raise CorruptCheckpointError(f"{name} does not match its digest in the manifest")


def read_document(folder: Place, name: str, *, manifest: Manifest, max_bytes: int = MAX_BYTES) -> Value:
    """Returns a JSON document whose bytes match the manifest; CorruptCheckpointError for others."""
    record = manifest.files.get(name)
    if record is None:
        raise CorruptCheckpointError(f"{name} is not in {MANIFEST_FILE}")
    with reading(name):
        content = read_file(folder, name, max_bytes=min(record.bytes, max_bytes))
        if digest_of_bytes(content, algorithm=manifest.algorithm) != record.digest:
            raise CorruptCheckpointError(f"{name} does not match its digest in the manifest")
        return parse_json(content, where=name)


def read_progress(folder: Place, *, manifest: Manifest | None = None) -> Progress:
    """Returns the progress of a checkpoint; CorruptCheckpointError if it is not valid or of another step."""
    manifest = manifest or read_manifest(folder)
    with reading(PROGRESS_FILE):
        progress = parse_progress(read_document(folder, PROGRESS_FILE, manifest=manifest))
    if progress.step != manifest.step:
        raise CorruptCheckpointError(
            f"{PROGRESS_FILE} belongs to step {progress.step}, the manifest to {manifest.step}"
        )
    return progress


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
        with contextlib.suppress(OSError):  # another process has, or the folder is read-only
            if not final.exists():
                old.rename(final)


def delete_leftovers(folder: Path, *, group: str = "") -> None:
    """Deletes what killed processes left behind. One process of a run calls it, before the first save.

    Other replica groups may be saving: a group deletes what it wrote itself, and what any of them began to delete.
    """
    kinds = rf"partial-{group}-.*|purged" if group else "partial(-.*)?|replaced|purged"
    for entry in folder.glob("step-*.*"):
        if re.fullmatch(rf"step-\d+\.({kinds})", entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def quarantine(folder: Path, *, step: int, suffix: str, reason: str) -> Path:
    """Renames a step, so that it no longer counts as a checkpoint; returns its new path."""
    name = name_aside(f"step-{step}", suffix=suffix, reason=reason)
    names = (folder / f"{name}{number}" for number in ("", *(f"-{again}" for again in range(2, 1000))))
    target = next(path for path in names if not os.path.lexists(path))
    with contextlib.suppress(FileNotFoundError):  # another replica group has renamed it
        step_folder(folder, step).rename(target)
    sync_folder(folder)
    return target


def name_aside(name: str, *, suffix: str, reason: str) -> str:
    """Returns the name that a step, or its manifest, gets where it no longer counts."""
    return f"{name}.{suffix}-{re.sub(r'[^A-Za-z0-9]+', '-', reason).strip('-')[:_MAX_REASON]}"


def purge(
    folder: Path, *, keep_latest_k: int, keep_every: int, keep_below: int = 0, has_all_files: bool = True
) -> list[int]:
    """Deletes and returns complete steps except the newest `keep_latest_k` (0: all) and multiples of `keep_every`.

    The newest step below `keep_below` is kept too. Without `has_all_files` other nodes have files of the steps, each of
    which counts as complete.
    """
    complete = [step for step in committed_steps(folder) if not has_all_files or is_complete(folder, step=step)]
    purged = steps_to_delete(complete, keep_latest_k=keep_latest_k, keep_every=keep_every, keep_below=keep_below)
    for step in purged:
        target = folder / f"step-{step}.purged"
        shutil.rmtree(target, ignore_errors=True)  # left by a killed process
        shutil.rmtree(step_folder(folder, step).rename(target), ignore_errors=True)
    return purged


def steps_to_delete(complete: Sequence[int], *, keep_latest_k: int, keep_every: int, keep_below: int) -> list[int]:
    """Returns those of the complete steps, oldest first, that `purge` deletes."""
    old = complete[:-keep_latest_k] if keep_latest_k else []
    kept = max((step for step in complete if step < keep_below), default=None)
    return [step for step in old if step != kept and not (keep_every and step % keep_every == 0)]


def mark_finished(folder: Path, *, step: int) -> None:
    """Records that the run is complete; only warns if it cannot, because the step itself is saved."""
    try:
        write_atomically(folder / _FINISHED_FILE, json.dumps({"step": step}).encode())
    except OSError as error:
        text = "%s/%s cannot be written: %s; the run is complete, but nothing but its last step says so"
        logger.warning(text, folder, _FINISHED_FILE, error.strerror)


def mark_unfinished(folder: Path) -> None:
    """Forgets that the run was complete: it was rewound to an earlier step."""
    (folder / _FINISHED_FILE).unlink(missing_ok=True)


def finished_step(folder: Path) -> int:
    """Returns the last step of a complete run; 0 if the run is not complete, or no checkpoint of that step is left."""
    try:
        step = read_json(folder / _FINISHED_FILE).table("step")["step"].integer()
    except (OSError, DocumentError):
        return 0
    newest = newest_complete_step(folder) or 0
    if newest < step:
        text = "%s/%s says that step %d was the last, but the newest complete checkpoint is that of step %d: ignored"
        logger.warning(text, folder, _FINISHED_FILE, step, newest)
        return 0
    return step


def _digest_of(content: object, *, algorithm: str) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return digest_of_bytes(text.encode(), algorithm=algorithm)


def digest_of_bytes(content: Bytes, *, algorithm: str) -> str:
    """Returns the digest of bytes by the algorithm of this name."""
    digest = DIGESTS[algorithm]()
    digest.update(content)
    return digest.hexdigest()
