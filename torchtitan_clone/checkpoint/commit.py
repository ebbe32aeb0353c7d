"""Checkpoint folders on disk: what makes one committed and whole, how it becomes so, and when it goes.

    step-N                 committed: it came by one rename, after its manifest
    step-N.partial-ID      being written, or left behind by a process that was killed
    step-N.bad-REASON      was found damaged; kept for people to look at
    step-N.left-REASON     is of a future that load_step turned away from
    step-N.replaced        the older of two saves of one step, for the moment of the exchange
    step-N.purged          being deleted
    finished.json          the run is complete

The manifest lists every file with its size and digest, and has a digest of its own. Nothing here needs torch, a process
group, or trust in what it reads.
"""

import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_clone.checkpoint.writer import DIGEST, DIGESTS, FileRecord, digest_of_file, write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint

logger = logging.getLogger("torchtitan_clone")

MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "progress.json"
_FINISHED_FILE = "finished.json"
_FORMAT = 1
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+\.(partial-.*|replaced|purged)")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class DamagedError(Exception):
    """A checkpoint is not what its manifest says, or has none; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run has done so far, apart from its tensors."""

    step: int
    tokens_seen: int
    skipped_steps: int
    data: Mapping[str, Any]


NOTHING_DONE = Progress(step=0, tokens_seen=0, skipped_steps=0, data={})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Every file of one committed step."""

    step: int
    algorithm: str
    files: Mapping[str, FileRecord]

    @property
    def bytes(self) -> int:
        """Size of the whole checkpoint."""
        return sum(record.bytes for record in self.files.values())


def step_folder(folder: Path, step: int) -> Path:
    """Where a committed step stands."""
    return folder / f"step-{step}"


def committed_steps(folder: Path) -> list[int]:
    """The steps that were committed, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)


def bad_steps(folder: Path) -> list[Path]:
    """What was set aside as damaged."""
    return sorted(folder.glob("step-*.bad-*"))


def newest_complete_step(folder: Path) -> int | None:
    """The newest step that looks whole, by sizes; None where there is none. Needs no process group, changes nothing."""
    return next((step for step in reversed(committed_steps(folder)) if is_complete(folder, step=step)), None)


def expected_progress(checkpoint: Checkpoint, *, folder: Path) -> Progress | None:
    """Where a run will go on from if no digest is wrong: load_step, or the newest step that looks whole."""
    if not checkpoint.enable:
        return None
    recover(folder)
    step = newest_complete_step(folder) if checkpoint.load_step == -1 else checkpoint.load_step
    if step is None or not is_complete(folder, step=step):
        return None
    return without_excluded(read_progress(step_folder(folder, step)), checkpoint=checkpoint)


def initial_folder(checkpoint: Checkpoint) -> tuple[Path, int | None] | None:
    """The checkpoint that a new run starts from, and its step where a folder of several was given; None for none.

    ConfigError where initial_load_path is no checkpoint.
    """
    if not checkpoint.initial_load_path or checkpoint.initial_load_in_hf:
        return None
    folder = Path(checkpoint.initial_load_path)
    step = newest_complete_step(folder)
    found = folder if step is None else step_folder(folder, step)
    if not (found / MANIFEST_FILE).exists():
        raise ConfigError(
            f"checkpoint.initial_load_path = {folder}: it has no {MANIFEST_FILE} and so is no checkpoint; for weights "
            "in the Hugging Face format set checkpoint.initial_load_in_hf to true"
        )
    return found, step


def without_excluded(progress: Progress, *, checkpoint: Checkpoint) -> Progress:
    """The progress, but for the position in the data where that is excluded from loading."""
    return replace(progress, data={}) if "data" in checkpoint.exclude_from_loading else progress


def is_complete(folder: Path, *, step: int) -> bool:
    """Whether all files of a step are there in their sizes, and the manifest and the progress are intact."""
    try:
        check_sizes(step_folder(folder, step), step=step)
    except DamagedError:
        return False
    return True


def write_manifest(folder: Path, *, step: int, files: Mapping[str, FileRecord]) -> None:
    """The last file of a checkpoint: from here on its content is settled."""
    content = {
        "format": _FORMAT,
        "step": step,
        "algorithm": DIGEST,
        "files": {name: asdict(record) for name, record in files.items()},
    }
    text = json.dumps({"manifest": content, "digest": _digest_of_text(_canonical(content), DIGEST)}, indent=1)
    write_file(folder / MANIFEST_FILE, [text.encode()])
    sync_folder(folder)


def read_manifest(folder: Path, *, step: int | None = None) -> Manifest:
    """The manifest of a checkpoint; DamagedError where it is missing, torn, or that of another step."""
    try:
        whole = json.loads((folder / MANIFEST_FILE).read_bytes())
        content = whole["manifest"]
        algorithm = content["algorithm"]
        intact = algorithm not in DIGESTS or whole["digest"] == _digest_of_text(_canonical(content), algorithm)
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        files[PROGRESS_FILE]  # every checkpoint has one
        manifest = Manifest(step=content["step"], algorithm=algorithm, files=files)
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST_FILE} is missing") from None
    except OSError as error:
        raise DamagedError(f"{MANIFEST_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{MANIFEST_FILE} is torn") from None
    if not intact:
        raise DamagedError(f"{MANIFEST_FILE} has another digest than it says")
    if algorithm not in DIGESTS:
        raise ConfigError(f"{folder} was written with {algorithm} digests: pip install xxhash")
    if step is not None and manifest.step != step:
        raise DamagedError(f"{MANIFEST_FILE} is that of step {manifest.step}")
    return manifest


def check_sizes(folder: Path, *, step: int | None = None) -> Manifest:
    """The manifest, if all files are there in their sizes, and the progress is intact; else DamagedError."""
    manifest = read_manifest(folder, step=step)
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise DamagedError(f"{name} is missing") from None
        if size != record.bytes:
            raise DamagedError(f"{name} has {size:,} bytes instead of {record.bytes:,}")
    check_digest(folder, PROGRESS_FILE, manifest=manifest)
    read_progress(folder)
    return manifest


def check_digest(folder: Path, name: str, *, manifest: Manifest) -> None:
    """Reads a file through; DamagedError if it is not what was written."""
    try:
        found = digest_of_file(folder / name, name=manifest.algorithm)
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror}") from None
    if found != manifest.files[name].digest:
        raise DamagedError(f"{name} has another digest than the manifest says")


def read_progress(folder: Path) -> Progress:
    """What stands in the folder of a step; needs no process group. DamagedError where it cannot be read."""
    try:
        return Progress(**json.loads((folder / PROGRESS_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedError(f"{PROGRESS_FILE} cannot be read: {error}") from None


def commit(partial: Path, final: Path) -> None:
    """Makes a complete folder visible in one step, in place of an older one of its name."""
    sync_folder(partial)
    if final.exists():
        _replace(partial, final)
    else:
        partial.rename(final)
    sync_folder(final.parent)


def _replace(partial: Path, final: Path) -> None:
    """Exchanges the two names; where the file system cannot, there are two renames, which `recover` completes."""
    old = final.with_name(f"{final.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(partial), os.fsencode(final)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        partial.rename(old)
    else:
        final.rename(old)
        partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Brings back a step that was about to be replaced when the process was killed; any process may call it."""
    for old in folder.glob("step-*.replaced"):
        final = old.with_name(old.name.removesuffix(".replaced"))
        if not final.exists():
            old.rename(final)


def clean(folder: Path) -> None:
    """Deletes what killed processes left behind; one process of a run calls it, before anything is saved."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def quarantine(folder: Path, *, step: int, suffix: str, reason: str) -> Path:
    """Renames a step, so that nothing takes it for a checkpoint any more."""
    name = f"step-{step}.{suffix}-{re.sub(r'[^A-Za-z0-9]+', '-', reason).strip('-')}"
    names = (folder / f"{name}{number}" for number in ("", *(f"-{again}" for again in range(2, 1000))))
    target = next(path for path in names if not path.exists())
    with contextlib.suppress(FileNotFoundError):  # another group of ranks was faster
        step_folder(folder, step).rename(target)
    sync_folder(folder)
    return target


def purge(folder: Path, *, keep_latest_k: int, keep_every: int) -> list[int]:
    """Deletes whole steps beyond the newest `keep_latest_k`, but none that is permanent; returns them.

    Steps that are not whole neither count nor go: the newest whole one always stays.
    """
    whole = [step for step in committed_steps(folder) if is_complete(folder, step=step)]
    old = whole[:-keep_latest_k] if keep_latest_k else []
    purged = [step for step in old if not (keep_every and step % keep_every == 0)]
    for step in purged:
        doomed = step_folder(folder, step).rename(folder / f"step-{step}.purged")
        shutil.rmtree(doomed, ignore_errors=True)
    return purged


def mark_finished(folder: Path, *, step: int) -> None:
    """Notes that the run is complete."""
    write_file(folder / f"{_FINISHED_FILE}.partial", [json.dumps({"step": step}).encode()])
    (folder / f"{_FINISHED_FILE}.partial").rename(folder / _FINISHED_FILE)
    sync_folder(folder)


def finished_step(folder: Path) -> int:
    """The step at which a run was complete; 0 where it was not."""
    try:
        return json.loads((folder / _FINISHED_FILE).read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def sync_folder(folder: Path) -> None:
    """Forces the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_of_rank(manifest: Manifest, *, rank: int, world_size: int) -> Iterator[str]:
    """The files whose digest a rank checks: the largest first, dealt out in turns."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
    yield from by_size[rank::world_size]


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _digest_of_text(text: str, algorithm: str) -> str:
    digest = DIGESTS[algorithm]()
    digest.update(text.encode())
    return digest.hexdigest()
