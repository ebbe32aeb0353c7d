"""Reads and writes checkpoints in one process without a process group, tensor by tensor; for scripts."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from torchtitan_clone.checkpoint.folder import MANIFEST_FILE, NOTHING_DONE, CorruptCheckpointError, read_progress
from torchtitan_clone.checkpoint.format import INDEX_FILE, MODEL, lay_out_offline
from torchtitan_clone.checkpoint.load import load_tensors, verify
from torchtitan_clone.checkpoint.save import finalize
from torchtitan_clone.checkpoint.tensor_file import file_content
from torchtitan_clone.checkpoint.writer import write_file
from torchtitan_clone.config import ConfigError


class Weights:
    """The parameters and buffers of a verified checkpoint; ConfigError if there is none, or if it is corrupted."""

    def __init__(self, folder: Path):
        try:
            self._index = verify(folder, step=None, digests=True)
            self.progress = read_progress(folder)
        except (CorruptCheckpointError, FileNotFoundError) as problem:
            what = f"{folder} is not a checkpoint or is corrupted: {problem}"
            raise ConfigError(f"{what}; give an intact step-N folder of a run") from None
        self.folder = folder

    def meta(self) -> dict[str, Tensor]:
        """Returns the tensors by name, on the meta device."""
        saved = ((name, tensor) for name, tensor in self._index.items() if name.startswith(MODEL))
        return {name.removeprefix(MODEL): tensor.empty(device="meta") for name, tensor in saved}

    def read(self, name: str) -> Tensor:
        full = self._index[MODEL + name].empty()
        try:
            load_tensors(self.folder, {MODEL + name: full}, index=self._index)
        except (CorruptCheckpointError, FileNotFoundError) as problem:
            raise ConfigError(f"{self.folder} changed while it was read: {problem}; try again") from None
        return full


def write_weights_checkpoint(
    folder: Path, *, meta: Mapping[str, Tensor], read: Callable[[str], Tensor], extra_files: Mapping[str, str]
) -> None:
    """Writes and verifies a checkpoint of step 0 that holds weights, read one by one.

    OSError if the disk fails, or if the folder is not that of another conversion, alone in its parent.
    """
    of_run = [path for path in folder.parent.glob("step-*") if path.name != folder.name and "." not in path.name]
    if of_run or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_FILE).is_file()):
        raise FileExistsError(f"{folder.parent} has {(of_run or [folder])[0].name}, which is kept; give another folder")
    layout = lay_out_offline({MODEL + name: tensor for name, tensor in meta.items()})
    partial = folder.with_name(f"{folder.name}.partial-offline")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = (read(placement.name.removeprefix(MODEL)) for placement in layout.placements)
    try:
        files = {layout.file: write_file(partial / layout.file, file_content(layout.header, tensors))}
        extra_files = {**extra_files, INDEX_FILE: layout.index}
        finalize(partial, folder, files=files, extra_files=extra_files, progress=NOTHING_DONE)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # is there after a failure
    try:
        verify(folder, step=0, digests=True)
    except CorruptCheckpointError as problem:
        raise OSError(f"{folder} does not read back as written: {problem}; check the disk it is on") from None
