"""Finds the folder that weights are read from, and tells it from others."""

import hashlib
from dataclasses import replace
from pathlib import Path

from torchtitan_clone.checkpoint.folder import CONFIG_FILE, MANIFEST_FILE, newest_complete_step, step_folder
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.downloads import describe_download, find_downloaded
from torchtitan_clone.config.resolved import checkpoint_folder
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.config.schema_training import Distillation
from torchtitan_clone.data.predictions import teachers_of
from torchtitan_clone.hub.folder import CONFIG_FILE as HUB_CONFIG_FILE

_LAST_BYTES = 1 << 20
"""Read of each file to tell a teacher from others at every start."""


def find_weights_folder(path: Path) -> Path:
    """Returns a step-N folder, the newest complete step of a run's folder, or a folder of the Hugging Face hub.

    ConfigError if there is none.
    """
    path = find_downloaded(path, repository="model")
    if not path.is_dir():
        hint = describe_download(str(path), repository="model")
        raise ConfigError(f"{path}: there is no such folder; give that of a run, a step or a Hugging Face model{hint}")
    if is_hub_folder(path) or (path / MANIFEST_FILE).exists():
        return path
    file = path / CONFIG_FILE
    options = load_config([f"--job.config_file={file}"]).checkpoint if file.is_file() else Checkpoint()
    for folder in (checkpoint_folder(path, checkpoint=options), path):
        if (step := newest_complete_step(folder)) is not None:
            return step_folder(folder, step)
    raise ConfigError(f"{path}: the folder has no complete checkpoint; give the folder of a run that has saved a step")


def is_hub_folder(path: Path) -> bool:
    """Returns whether a folder is in the format of the Hugging Face hub."""
    return (path / HUB_CONFIG_FILE).is_file()


def digest_of_weights(folder: Path, *, last_bytes: int | None = None) -> str:
    """Returns the SHA-256 of a checkpoint's manifest, which has the digests of its files, or of all weights and their
    config.json in the format of the Hugging Face hub.

    With `last_bytes` only so many of each file are read.
    """
    manifest = folder / MANIFEST_FILE
    digest = hashlib.sha256()
    of_hub = [*sorted(folder.glob("*.safetensors")), folder / HUB_CONFIG_FILE]
    for path in [manifest] if manifest.is_file() else of_hub:
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(0, path.stat().st_size - last_bytes))
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def digest_of_teacher(path: str) -> str:
    """Returns what tells a teacher from others, wherever it is. ConfigError if it is not there."""
    return digest_of_weights(find_weights_folder(Path(path)), last_bytes=_LAST_BYTES)


def with_digest(options: Distillation) -> Distillation:
    """Returns the options with digests of the teacher in place of where it is. ConfigError if it is not there."""
    if options.teacher_path is not None:
        return replace(options, teacher_path=digest_of_teacher(options.teacher_path))
    return replace(options, store=" ".join(teachers_of(Path(options.store or ""))))
