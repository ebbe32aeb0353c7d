"""Copies steps between folders and object stores, verified while they are read; for scripts."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchtitan_clone.checkpoint import folder as folders
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError
from torchtitan_clone.checkpoint.remote import LocalFile, Pace, RemoteFolder, RemoteStep, as_local, open_remote
from torchtitan_clone.checkpoint.summary import choose_step
from torchtitan_clone.checkpoint.writer import CHUNK, write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.urls import find_url_errors, local_path
from torchtitan_clone.documents import open_regular

TIMEOUT_SECONDS = 60.0


def open_place(text: str) -> Path | RemoteFolder:
    """Returns the folder or the object store that an argument names; ConfigError for a URL that names none."""
    if errors := list(find_url_errors("folder", text)):
        raise ConfigError(errors)
    path = local_path(text)
    return open_remote(text, timeout_seconds=TIMEOUT_SECONDS) if path is None else Path(path)


def copy_step(source: Path | RemoteFolder, target: Path | RemoteFolder, *, step: int | None) -> int:
    """Copies a step, by default the newest complete one, and returns it; ConfigError if that cannot be done."""
    wanted = choose_step(source, step=step)
    try:
        if isinstance(source, Path):
            if isinstance(target, Path):
                raise ConfigError(f"{source} and {target} are both folders: copy step-{wanted} with cp -r")
            _upload(folders.step_folder(source, wanted), target)
        elif isinstance(target, Path):
            _download(source.step(wanted), folders.step_folder(target, wanted))
        else:
            with tempfile.TemporaryDirectory() as folder:
                _download(source.step(wanted), folders.step_folder(Path(folder), wanted))
                _upload(folders.step_folder(Path(folder), wanted), target)
    except CorruptCheckpointError as error:
        raise ConfigError(f"step {wanted} of {source} is corrupted: {error}; choose another one with --step") from None
    return wanted


def _upload(folder: Path, target: RemoteFolder) -> None:
    manifest = folders.check_sizes(folder)
    files = dict(manifest.files)
    for name, record in manifest.files.items():
        with folders.reading(name), open_regular(folder / name) as file:
            each = LocalFile(name=name, record=record, file=file, algorithm=manifest.algorithm)
            files |= target.upload(manifest.step, each, pace=Pace(None))
    if not target.commit(folders.Manifest(step=manifest.step, algorithm=manifest.algorithm, files=files)):
        raise ConfigError(f"{target} has another step {manifest.step}, which is kept; give another prefix")


def _download(step: RemoteStep, folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists, and is kept; give another folder")
    step.check_sizes()
    manifest = as_local(step.manifest)
    partial = folder.with_name(f"{folder.name}.partial-copy")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name in manifest.files:
            with folders.reading(name):
                write_file(partial / name, _chunks(step, name))
            folders.check_digest(partial, name, manifest=manifest)
        write_file(partial / folders.MANIFEST_FILE, [folders.encode_manifest(manifest)])
        folders.commit(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # is there after a failure


def _chunks(step: RemoteStep, name: str) -> Iterator[bytes]:
    with folders.open_file(step, name) as file:
        while chunk := file.read(CHUNK):
            yield chunk
