"""Folders of weights as the Hugging Face hub has them: files of tensors, an index, config.json and what else belongs.

How our tensors are made up of the hub's is given by their pieces, see ops/tensor_pieces.py. Writing needs the memory of
one tensor, reading that of nothing but the tensors that are filled.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.commit import commit
from torchtitan_clone.checkpoint.full_tensor import FullTensorGather
from torchtitan_clone.checkpoint.loading import first_error
from torchtitan_clone.checkpoint.tensor_file import Entry, open_tensors, read_entries, write_tensor_file
from torchtitan_clone.checkpoint.writer import write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.ops.dtensor_shards import local_shard_and_offset
from torchtitan_clone.ops.tensor_pieces import Piece, Pieces

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""A file of tensors ends before it gets larger than this."""
LONGEST_WAIT = timedelta(hours=1)
"""For one tensor of a peer, or for the disks of all; a peer that has died is noticed at once."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """One export: `error` says why it failed, None means that it is committed."""

    seconds: float
    gib: float
    error: str | None


def export_weights(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    pieces: Pieces,
    dtype: torch.dtype,
    files: Mapping[str, bytes],
    file_bytes: int = FILE_BYTES,
) -> ExportReport:
    """Writes the folder from the tensors that the ranks hold; a collective over all ranks.

    `pieces` maps the tensors of all ranks, in the order of the files, to those of the folder; `files` is what else is
    in the folder. The folder appears complete and read back, or not at all: then the error is reported, not raised.
    """
    start = time.perf_counter()
    group: Any = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    try:
        gather = FullTensorGather(tensors, pieces=pieces, dtype=dtype, group=group)
        layout = plan_files(gather.entries(), file_bytes=file_bytes)
        error = _export(folder, gather=gather, layout=layout, files=files, group=group)
    finally:
        dist.destroy_process_group(group)
    size = sum(entry.num_bytes for entries in layout.values() for entry in entries)
    return ExportReport(seconds=time.perf_counter() - start, gib=size / 2**30, error=error)


def _export(
    folder: Path,
    *,
    gather: FullTensorGather,
    layout: Mapping[str, Sequence[Entry]],
    files: Mapping[str, bytes],
    group: dist.ProcessGroup,
) -> str | None:
    partial = partial_folder(folder)
    leads = dist.get_rank() == 0
    error = first_error(disk_error(lambda: make_empty(partial)) if leads else None, group=group)
    if error is not None:
        return error
    for name, entries in layout.items():
        problem = _write_gathered(partial / name, entries=entries, gather=gather)
        error = error or problem
    error = first_error(error, group=group)
    if leads and error is None:
        error = disk_error(lambda: commit_folder(folder, layout=layout, files=files))
    if leads and error is not None:
        shutil.rmtree(partial, ignore_errors=True)
    return first_error(error, group=group)


def _write_gathered(path: Path, *, entries: Sequence[Entry], gather: FullTensorGather) -> str | None:
    """One file, by a rank that holds some of it; the others send their parts. Returns what the disk said against it."""
    writer_rank = gather.holder(entries[0].name)
    tensors = (gather.collect(entry, at=writer_rank) for entry in entries)
    error = None
    if dist.get_rank() == writer_rank:
        error = disk_error(lambda: write_tensor_file(path, entries=entries, tensors=cast("Iterator[Tensor]", tensors)))
    # The other ranks send theirs; after an error, the writer takes them all the same.
    for _ in tensors:
        pass
    return error


def write_weights(
    folder: Path,
    *,
    entries: Sequence[Entry],
    read: Callable[[Entry], Tensor],
    files: Mapping[str, bytes],
    file_bytes: int = FILE_BYTES,
) -> None:
    """The same in one process that reads the tensors one by one from somewhere; OSError where the disk is full."""
    layout = plan_files(entries, file_bytes=file_bytes)
    make_empty(partial_folder(folder))
    for name, its_entries in layout.items():
        write_tensor_file(partial_folder(folder) / name, entries=its_entries, tensors=map(read, its_entries))
    commit_folder(folder, layout=layout, files=files)


def plan_files(entries: Sequence[Entry], *, file_bytes: int) -> dict[str, list[Entry]]:
    """Which tensors stand in which file, in their order; large numbers first, so that all of them are aligned."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.num_bytes for e in groups[-1]) + entry.num_bytes > file_bytes:
            groups.append([])
        groups[-1].append(entry)
    ordered = [sorted(group, key=lambda entry: -entry.item_bytes) for group in groups]
    if len(ordered) == 1:
        return {"model.safetensors": ordered[0]}
    return {f"model-{i:05}-of-{len(ordered):05}.safetensors": group for i, group in enumerate(ordered, start=1)}


def partial_folder(folder: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return folder.with_name(f"{folder.name}.partial")


def make_empty(folder: Path) -> None:
    """A new empty folder, in the place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def commit_folder(folder: Path, *, layout: Mapping[str, Sequence[Entry]], files: Mapping[str, bytes]) -> None:
    """Adds the index and the other files to what was written, and renames: the folder is there, or it is not."""
    partial = partial_folder(folder)
    if absent := [name for name in layout if not (partial / name).is_file()]:
        raise OSError(f"{partial} lacks {', '.join(absent)}, which other nodes wrote: the folder must be shared by all")
    for name, content in {**files, **_index(layout)}.items():
        write_file(partial / name, [content])
    commit(partial, folder)


def _index(layout: Mapping[str, Sequence[Entry]]) -> dict[str, bytes]:
    """The index, by its file name; a single file needs none."""
    if len(layout) == 1:
        return {}
    size = sum(entry.num_bytes for entries in layout.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in layout.items() for entry in entries}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    return {INDEX_FILE: json.dumps(index, indent=2).encode() + b"\n"}


def disk_error(action: Callable[[], object]) -> str | None:
    """Runs `action`; what the disk had to say against it, None where nothing."""
    try:
        action()
    except OSError as error:
        return str(error)
    return None


@dataclass(frozen=True, kw_only=True)
class WeightFolder:
    """A folder of the hub's that can be read: its config.json, and which file holds which tensor."""

    path: Path
    config: Mapping[str, Any]
    entries: Mapping[str, Entry]
    files: Mapping[str, Path]

    def fill(self, tensors: Mapping[str, Tensor], *, pieces: Pieces) -> None:
        """Copies into each of our tensors, complete or a shard, its values; reads little more than these."""
        needed: dict[Path, list[tuple[str, Piece]]] = {}
        for name in tensors:
            for piece in pieces[name]:
                needed.setdefault(self.files[piece.source], []).append((name, piece))
        boxes = {name: local_shard_and_offset(tensor) for name, tensor in tensors.items()}
        with torch.no_grad():
            for path, parts in needed.items():
                with open_tensors(path) as file:
                    for name, piece in parts:
                        box, offset = boxes[name]
                        overlap = piece.overlap(tensors[name].shape, offset=offset, size=box.shape)
                        if overlap is not None:
                            overlap.in_box(box).copy_(overlap.read(file.get_slice(piece.source)))

    def read(self, name: str) -> Tensor:
        """One whole tensor."""
        with open_tensors(self.files[name]) as file:
            return file.get_tensor(name)


def open_weight_folder(path: Path) -> WeightFolder:
    """Reads config.json, the index and the headers; ConfigError where the folder is not there, or not whole."""
    from safetensors import SafetensorError

    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such folder")
    entries: dict[str, Entry] = {}
    files: dict[str, Path] = {}
    for file in _weight_files(path):
        try:
            found = read_entries(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; copy or download it again") from error
        entries |= {entry.name: entry for entry in found}
        files |= {entry.name: file for entry in found}
    return WeightFolder(path=path, config=_read_json(path / CONFIG_FILE), entries=entries, files=files)


def _weight_files(path: Path) -> list[Path]:
    """The files that the index names, or all where there is no index."""
    if not (path / INDEX_FILE).is_file():
        if not (found := sorted(path.glob("*.safetensors"))):
            raise ConfigError(f"{path}: there is no .safetensors file in it")
        return found
    weight_map = _read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{path / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    if absent := [name for name in names if not (path / name).is_file()]:
        raise ConfigError(f"{path}: {', '.join(absent)} stand in {INDEX_FILE}, but not in the folder")
    return [path / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: there is no {path.name} in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return found
