"""Reads and writes checkpoints in one process without a process group, tensor by tensor; for scripts."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.checkpoint.folder import MANIFEST_FILE, CorruptCheckpointError, read_progress
from torchtitan_clone.checkpoint.format import EMA, INDEX_FILE, MODEL, lay_out_offline
from torchtitan_clone.checkpoint.load import load_tensors, verify
from torchtitan_clone.checkpoint.progress import NOTHING_DONE, Progress
from torchtitan_clone.checkpoint.save import finalize
from torchtitan_clone.checkpoint.tensor_file import file_content
from torchtitan_clone.checkpoint.writer import write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import escape


class Weights:
    """The parameters and buffers of a verified checkpoint; ConfigError if there is none, or if it is corrupted.

    With `averages` parameters are their moving averages; ConfigError if the checkpoint has none. Without `digests` the
    bytes of tensors are not compared with theirs.
    """

    def __init__(self, folder: Path, *, averages: bool = False, digests: bool = True):
        try:
            self._index = verify(folder, step=None, digests=digests)
            self.progress = read_progress(folder)
        except (CorruptCheckpointError, FileNotFoundError) as problem:
            what = f"{folder} is not a checkpoint or is corrupted: {problem}"
            raise ConfigError(f"{what}; give an intact step-N folder of a run") from None
        self.folder = folder
        self._names = {name.removeprefix(MODEL): name for name in self._index if name.startswith(MODEL)}
        averaged = {name.removeprefix(EMA): name for name in self._index if averages and name.startswith(EMA)}
        if averages and not averaged:
            raise ConfigError(f"{folder} has no averages of weights; give a step of a run with ema.enable = true")
        self._names |= averaged

    def meta(self) -> dict[str, Tensor]:
        """Returns the tensors by name, on the meta device."""
        return {name: self._index[saved].empty(device="meta") for name, saved in self._names.items()}

    def read(self, name: str) -> Tensor:
        full = self._index[self._names[name]].empty()
        self.fill({name: full})
        return full

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies values into tensors by name, global ones or shards; with a process group a collective."""
        wanted = {self._names[name]: tensor for name, tensor in tensors.items()}
        try:
            load_tensors(self.folder, wanted, index=self._index)
        except (CorruptCheckpointError, FileNotFoundError) as problem:
            raise ConfigError(f"{self.folder} changed while it was read: {problem}; try again") from None


def check_alike(checkpoints: Sequence[Weights]) -> None:
    """ConfigError if tensors of checkpoints have other names, shapes or data types than those of the first."""
    first, *others = ({name: (x.shape, x.dtype) for name, x in each.meta().items()} for each in checkpoints)
    for other, checkpoint in zip(others, checkpoints[1:], strict=True):
        if wrong := sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name)):
            names = escape(", ".join(wrong[:5]))
            what = f"{checkpoints[0].folder} and {checkpoint.folder} differ in {names}"
            raise ConfigError(f"{what}; give checkpoints of one model")


def mean_of(checkpoints: Sequence[Weights], name: str) -> Tensor:
    """Returns the mean of a tensor, which is summed in fp64 in the order of the checkpoints and rounded once."""
    meta = checkpoints[0].meta()[name]
    total = torch.zeros(meta.shape, dtype=torch.float64)
    for each in checkpoints:
        total += each.read(name)
    return (total / len(checkpoints)).to(meta.dtype)


def write_weights_checkpoint(
    folder: Path, *, meta: Mapping[str, Tensor], read: Callable[[str], Tensor], extra_files: Mapping[str, str]
) -> None:
    """Writes and verifies a checkpoint of step 0 that holds weights, read one by one; OSError as write_checkpoint()."""
    state = {MODEL + name: tensor for name, tensor in meta.items()}
    write_checkpoint(
        folder, meta=state, read=lambda name: read(name.removeprefix(MODEL)), extra_files=extra_files,
        progress=NOTHING_DONE,
    )  # fmt: skip


def write_checkpoint(
    folder: Path, *, meta: Mapping[str, Tensor], read: Callable[[str], Tensor], extra_files: Mapping[str, str],
    progress: Progress,
) -> None:  # fmt: skip
    """Writes and verifies a checkpoint of a progress, with tensors by their names there, read one by one.

    OSError if the disk fails, or if the folder is not that of another conversion, alone in its parent.
    """
    of_run = [path for path in folder.parent.glob("step-*") if path.name != folder.name and "." not in path.name]
    if of_run or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_FILE).is_file()):
        raise FileExistsError(f"{folder.parent} has {(of_run or [folder])[0].name}, which is kept; give another folder")
    layout = lay_out_offline(meta)
    partial = folder.with_name(f"{folder.name}.partial-offline")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = (read(placement.name) for placement in layout.placements)
    try:
        files = {layout.file: write_file(partial / layout.file, file_content(layout.header, tensors))}
        extra_files = {**extra_files, INDEX_FILE: layout.index}
        finalize(partial, folder, files=files, extra_files=extra_files, progress=progress)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # is there after a failure
    try:
        verify(folder, step=progress.step, digests=True)
    except CorruptCheckpointError as problem:
        raise OSError(f"{folder} does not read back as written: {problem}; check the disk it is on") from None
