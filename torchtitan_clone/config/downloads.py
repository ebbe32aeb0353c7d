"""Repositories of the Hugging Face hub in the cache of this machine, which `hf download` fills; nothing is downloaded.

A repository is named as on the hub, "org/name", or with a commit, branch or tag, "org/name@revision".
"""

import os
import re
from pathlib import Path
from typing import Literal

from torchtitan_clone.config.messages import ConfigError

_NAME = r"[A-Za-z0-9][\w.-]*"
_REPOSITORY = re.compile(rf"({_NAME}/{_NAME})(?:@([\w./-]+))?")
Repository = Literal["model", "tokenizer", "dataset"]
_NEEDED: dict[Repository, list[str] | None] = {
    "model": ["config.json", "*.safetensors", "*.safetensors.index.json"],
    "tokenizer": ["tokenizer.json", "tokenizer_config.json"],
    "dataset": None,
}
"""Patterns of the files of which none may be missing; None: of all."""


def find_downloaded(path: Path | str, *, repository: Repository) -> Path:
    """Returns the path if something is there, else the folder of the cache that holds the repository of that name.

    Without such a folder it returns the path. ConfigError if a part of the repository is missing there.
    """
    if os.path.lexists(path) or not (found := _REPOSITORY.fullmatch(str(path))):
        return Path(path)
    from huggingface_hub import errors, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    name, revision = found.groups()
    kind = "dataset" if repository == "dataset" else "model"
    try:
        folder = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=_NEEDED[repository], local_files_only=True
        )
        return Path(folder)
    except errors.LocalEntryNotFoundError as error:
        if (folder := getattr(error, "snapshot_path", None)) is not None:  # since version 2
            remedy = f"complete it (`{_command(str(path), repository)}`), or name {folder} to use what is there"
            raise ConfigError(f"{path}: the cache of the Hugging Face hub has only a part of it; {remedy}.") from error
    except (errors.HFValidationError, OSError):  # no name of a repository, or a cache that cannot be read
        pass
    return Path(path)


def _command(name: str, repository: Repository) -> str:
    name, _, revision = name.partition("@")
    options = {"dataset": " --repo-type dataset", "tokenizer": " tokenizer.json tokenizer_config.json", "model": ""}
    return f"hf download {name}{options[repository]}{f' --revision {revision}' if revision else ''}"


def describe_download(path: str, *, repository: Repository) -> str:
    """Returns how to download a missing path that may name a repository of the Hugging Face hub; "" for other paths."""
    if not _REPOSITORY.fullmatch(path):
        return ""
    stream = f', or stream it with training.dataset = "{path}"' if repository == "dataset" else ""
    return f"; if it is a {repository} of the Hugging Face hub, download it (`{_command(path, repository)}`){stream}"
