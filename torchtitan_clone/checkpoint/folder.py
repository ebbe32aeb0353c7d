"""Checkpoint folders on disk, without torch. A step is committed by a rename, after its manifest was written.

step-N.partial-ID        being written, or left behind by a killed process; .partial-GROUP-ID of a replica group
  -> step-N              committed
       -> .replaced      the older of two saves of one step, while they are exchanged
       -> .bad-REASON    corrupted
       -> .left-REASON   newer than load_step
       -> .purged        being deleted
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torchtitan_clone.checkpoint.writer import ALGORITHMS, DIGEST, DIGESTS, Bytes, FileRecord, digest_of, write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import describe_download
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.documents import (
    MAX_BYTES,
    MAX_INTEGER,
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
_REWIND_FILE = "rewind.json"
_FORMAT = 1
_MAX_DIGITS = 18  # of a step
_MAX_REASON = 100  # characters in the name of a folder
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
    spikes: Mapping[str, object] = field(default_factory=dict[str, object])
    """The steps that the next one is compared with, {} where nothing is done about spikes."""

    def to_json(self) -> dict[str, object]:
        """Returns this as data that JSON can hold; without `spikes` if it is {}, as before there were any."""
        content = asdict(self)
        return content if self.spikes else {key: value for key, value in content.items() if key != "spikes"}


NOTHING_DONE = Progress(step=0, tokens_seen=0, skipped_steps=0, data={})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of one committed step; `algorithm` is that of their digests."""

    step: int
    algorithm: str
    files: Mapping[str, FileRecord]


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
    pattern = rf"step-(0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}})"
    matches = [re.fullmatch(pattern, entry.name) for entry in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def corrupt_steps(folder: Path) -> list[Path]:
    """Returns the folders that were renamed because they were corrupted."""
    return sorted(folder.glob("step-*.bad-*"))


def newest_complete_step(folder: Path) -> int | None:
    """Returns the newest step whose files have the recorded sizes, or None. Changes nothing."""
    return next((step for step in reversed(committed_steps(folder)) if is_complete(folder, step=step)), None)


def steps_to_resume(folder: Path, *, checkpoint: Checkpoint, identity: str) -> list[int]:
    """Returns the steps that a run may resume from, oldest first; `identity` is text that tells it from other runs.

    With load_step these are that step and, if this run was rewound to it before, the later ones.
    """
    steps, first = committed_steps(folder), checkpoint.load_step
    if first == -1:
        return steps
    last = steps[-1] if steps and _was_rewound(folder, step=first, identity=identity) else first
    return [step for step in steps if first <= step <= last]


def _was_rewound(folder: Path, *, step: int, identity: str) -> bool:
    try:
        record = read_json(folder / _REWIND_FILE).table("step", "run")
        return record["step"].integer() == step and record["run"].text() == _digest_of(identity, algorithm=DIGEST)
    except (OSError, DocumentError):
        return False


def record_rewind(folder: Path, *, checkpoint: Checkpoint, identity: str) -> None:
    """Records the step that load_step rewinds this run to, -1 for none; only warns if it cannot."""
    record = {"step": checkpoint.load_step, "run": _digest_of(identity, algorithm=DIGEST)}
    file = folder / _REWIND_FILE
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
    for step in reversed(steps_to_resume(folder, checkpoint=checkpoint, identity=identity)):
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


def progress_to_resume(folder: Path, *, checkpoint: Checkpoint) -> Progress:
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
    records = {name: asdict(record) for name, record in files.items()}
    content = {"format": _FORMAT, "step": step, "algorithm": DIGEST, "files": records}
    text = json.dumps({"manifest": content, "digest": _digest_of(content, algorithm=DIGEST)}, indent=1)
    write_file(folder / MANIFEST_FILE, [text.encode()])
    sync_folder(folder)


def read_manifest(folder: Path, *, step: int | None = None) -> Manifest:
    """Returns the manifest of a checkpoint; CorruptCheckpointError if it is missing, invalid or of another step."""
    with reading(MANIFEST_FILE):
        document = read_json(folder / MANIFEST_FILE).table("manifest", "digest")
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
    step = content["step"].integer(high=10**_MAX_DIGITS - 1)
    return Manifest(step=step, algorithm=content["algorithm"].choice(*ALGORITHMS), files=files)


def check_sizes(folder: Path, *, step: int | None = None) -> Manifest:
    """Returns the manifest; CorruptCheckpointError if a file has another size or the progress is not intact."""
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


def check_digest(folder: Path, name: str, *, manifest: Manifest) -> None:
    """Reads a file; CorruptCheckpointError if it does not match its digest in the manifest."""
    with reading(name), open_regular(folder / name) as file:
        digest = digest_of(file, name=manifest.algorithm)
    if digest != manifest.files[name].digest:
        raise CorruptCheckpointError(f"{name} does not match its digest in the manifest")


def read_document(folder: Path, name: str, *, manifest: Manifest, max_bytes: int = MAX_BYTES) -> Value:
    """Returns a JSON document whose bytes match the manifest; CorruptCheckpointError for others."""
    record = manifest.files.get(name)
    if record is None:
        raise CorruptCheckpointError(f"{name} is not in {MANIFEST_FILE}")
    with reading(name):
        content = read_regular(folder / name, max_bytes=min(record.bytes, max_bytes))
        if _digest_of_bytes(content, algorithm=manifest.algorithm) != record.digest:
            raise CorruptCheckpointError(f"{name} does not match its digest in the manifest")
        return parse_json(content, where=name)


def read_progress(folder: Path, *, manifest: Manifest | None = None) -> Progress:
    """Returns the progress of a checkpoint; CorruptCheckpointError if it is not valid or of another step."""
    manifest = manifest or read_manifest(folder)
    with reading(PROGRESS_FILE):
        progress = parse_progress(read_document(folder, PROGRESS_FILE, manifest=manifest))
    if progress.step != manifest.step:
        raise CorruptCheckpointError(
            f"{PROGRESS_FILE} belongs to step {progress.step}, the manifest to {manifest.step}"
        )
    return progress


def parse_progress(value: Value) -> Progress:
    """Returns the progress that a document holds; DocumentError if a value has another type or range."""
    optional = ["spikes"] if "spikes" in value.plain_entries() else []
    content = value.table("step", "tokens_seen", "skipped_steps", "data", *optional)
    step = content["step"].integer(high=10**_MAX_DIGITS - 1)
    return Progress(
        step=step,
        tokens_seen=content["tokens_seen"].integer(),
        skipped_steps=content["skipped_steps"].integer(high=step),
        data=check_position(content["data"]),
        spikes=content["spikes"].plain_entries() if optional else {},
    )


def check_position(value: Value) -> Mapping[str, object]:
    """Returns the position in the data that a checkpoint or a peer states, {} if it was not saved.

    DocumentError if a value has another type or range: a loader believes the others.
    """
    content = value.entries()
    if content and "samples" not in content:
        value.refuse("must have samples")
    for key, each in content.items():
        if key in _CHECKS:
            _CHECKS[key](each)
    return {key: each.value for key, each in content.items()}


def _check_cursors(value: Value) -> None:
    for cursor in value.items():
        cursor.integers(count=3)
    if not value.value:
        value.refuse("must have a cursor for every row of a global batch")


def _check_bookmark(value: Value) -> None:
    epoch, document, place = value.items(count=3)
    epoch.integer()
    document.integer()
    if place.value is not None:
        place.text(max_chars=MAX_BYTES)


def _check_streams(value: Value) -> None:
    for stream in value.items():
        for key, each in stream.table("cursors", "bookmark").items():
            _CHECKS[key](each)


_CHECKS: Mapping[str, Callable[[Value], object]] = {
    "samples": lambda value: value.integer(high=2**62),
    "data": Value.text,
    "tokenizer": Value.text,
    "eos_id": Value.integer,
    "held_out_fraction": lambda value: value.number(low=0, high=1),
    "seq_len": Value.integer,
    "document_masking": Value.flag,
    "seed": lambda value: value.integer(low=-MAX_INTEGER, high=MAX_INTEGER),
    "cursors": _check_cursors,
    "bookmark": _check_bookmark,
    "streams": _check_streams,
    "stages": lambda value: [stage.entries().get("first_step", stage).integer(low=1) for stage in value.items()],
}


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
    name = f"step-{step}.{suffix}-{re.sub(r'[^A-Za-z0-9]+', '-', reason).strip('-')[:_MAX_REASON]}"
    names = (folder / f"{name}{number}" for number in ("", *(f"-{again}" for again in range(2, 1000))))
    target = next(path for path in names if not os.path.lexists(path))
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
        target = folder / f"step-{step}.purged"
        shutil.rmtree(target, ignore_errors=True)  # left by a killed process
        shutil.rmtree(step_folder(folder, step).rename(target), ignore_errors=True)
    return purged


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
    return _digest_of_bytes(text.encode(), algorithm=algorithm)


def _digest_of_bytes(content: Bytes, *, algorithm: str) -> str:
    digest = DIGESTS[algorithm]()
    digest.update(content)
    return digest.hexdigest()
