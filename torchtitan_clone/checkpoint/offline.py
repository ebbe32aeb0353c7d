"""Checkpoints read and written by one process without a process group, tensor by tensor: for scripts."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.commit import Progress
from torchtitan_clone.checkpoint.layout import INDEX_FILE, plan_alone
from torchtitan_clone.checkpoint.loading import CheckpointReader, load_tensors, read_index
from torchtitan_clone.checkpoint.resume import find_corruption
from torchtitan_clone.checkpoint.saving import finalize
from torchtitan_clone.checkpoint.tensor_file import DTYPES, bytes_of
from torchtitan_clone.checkpoint.writer import pieces_of, write_file
from torchtitan_clone.config import ConfigError

MODEL = "model/"


class Weights:
    """The weights in a checkpoint; ConfigError where it is none, or damaged."""

    def __init__(self, folder: Path):
        if (damage := find_corruption(folder, step=None, digests=True)) is not None:
            raise ConfigError(f"{folder}: it is damaged or no checkpoint: {damage}")
        self._folder = folder
        self._reader = CheckpointReader(folder)
        self._index = read_index(folder)

    def meta(self) -> dict[str, Tensor]:
        """Type and shape of each, by name, as tensors without values."""
        return {
            name.removeprefix(MODEL): torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
            for name, entry in self._index.items()
            if name.startswith(MODEL)
        }

    def read(self, name: str) -> Tensor:
        """One of them, whole."""
        entry = self._index[MODEL + name]
        whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        load_tensors(self._folder, {MODEL + name: whole}, reader=self._reader)
        return whole


def write_weights_checkpoint(
    folder: Path, *, meta: Mapping[str, Tensor], read: Callable[[str], Tensor], documents: Mapping[str, str]
) -> None:
    """Writes a checkpoint of step 0 that holds weights only, and reads it back. OSError where the disk is full.

    `meta` has their types and shapes; `read` is called for each when its turn has come.
    """
    plan = plan_alone({MODEL + name: tensor for name, tensor in meta.items()})
    partial = folder.with_name(f"{folder.name}.partial-alone")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    def pieces() -> Iterator[bytes | memoryview]:
        yield plan.layout.header
        for place in plan.layout.placements:
            tensor = read(place.item.index.fqn.removeprefix(MODEL))
            numbers: Any = bytes_of(tensor).numpy()
            yield from pieces_of(memoryview(numbers))

    file = plan.layout.file
    files = {file: write_file(partial / file, pieces())}
    progress = Progress(step=0, tokens_seen=0, skipped_steps=0, data={})
    finalize(partial, folder, files=files, documents={**documents, INDEX_FILE: plan.index}, progress=progress)
    if (damage := find_corruption(folder, step=0, digests=True)) is not None:
        raise OSError(f"{folder} does not read back as it was written: {damage}")
