"""Writes folders of weights in the format of the Hugging Face hub; it needs the memory of one tensor."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint import tensor_file
from torchtitan_clone.checkpoint.agree import first_error
from torchtitan_clone.checkpoint.folder import commit
from torchtitan_clone.checkpoint.tensor_file import Entry, bytes_of, entry_for, exported_dtype
from torchtitan_clone.checkpoint.writer import write_file
from torchtitan_clone.config import ConfigError
from torchtitan_clone.data.tokenizer import GENERATION_FILE, Tokenizer, tokenizer_files
from torchtitan_clone.documents import DocumentError
from torchtitan_clone.hub.folder import CONFIG_FILE, INDEX_FILE, Entries, Tensors
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.dtensor_shards import TensorShard, gather_shard_map, local_shard
from torchtitan_clone.ops.tensor_slices import TensorSlices, sources_of

_SUFFIXES = (".safetensors", ".json", ".model", ".txt", ".jinja")
"""Of the files of an export: weights, settings, and a tokenizer's."""
FILE_BYTES = 5 * 10**9  # largest size of a file that holds several tensors
LONGEST_WAIT = timedelta(hours=1)  # for the disks of all ranks; the death of a rank is noticed at once
Layout = Mapping[str, Entries]
Files = Mapping[str, bytes]
GetFiles = Callable[[], Files]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of one export: `error` says why it failed, None means that it is committed."""

    seconds: float
    gib: float
    error: str | None


def export_weights(
    folder: Path,
    *,
    tensors: Tensors,
    slices: TensorSlices,
    dtype: torch.dtype,
    files: GetFiles,
    file_bytes: int = FILE_BYTES,
) -> ExportReport:
    """Writes a folder of weights from the tensors that the ranks hold. Collective.

    `slices` maps the tensors of all ranks, in the order of the files; `files` returns the other files, on rank 0. The
    folder appears complete and verified or not at all: then the error is reported, not raised.
    """
    start = time.perf_counter()
    group: Any = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    try:
        gather = FullTensorGather(tensors, slices=slices, dtype=dtype, group=group)
        layout = plan_files(gather.entries(), file_bytes=file_bytes)
        error = _export(folder, gather=gather, layout=layout, files=files)
    finally:
        dist.destroy_process_group(group)
    return ExportReport(seconds=time.perf_counter() - start, gib=_total_bytes(layout) / 2**30, error=error)


class FullTensorGather:
    """Assembles complete tensors, one at a time, from the shards of all ranks; floating-point ones as `dtype`.

    The values are sent as bytes over the CPU. All ranks must construct it and call `collect` in the same order.
    """

    def __init__(self, tensors: Tensors, *, slices: TensorSlices, dtype: torch.dtype, group: dist.ProcessGroup):
        self.group = group
        self._rank = dist.get_rank()
        self._dtype = dtype
        self._local = {name: local_shard(tensor) for name, tensor in tensors.items()}
        shard_map = gather_shard_map(tensors, group=group)
        self._shards = {name: _without_replicas(shards) for name, shards in shard_map.items()}
        self._sources = sources_of(slices)

    def entries(self) -> list[Entry]:
        dtypes = {ours: next(iter(shards.values())).dtype for ours, shards in self._shards.items()}
        return [
            entry_for(name, dtype=exported_dtype(ours, dtypes[ours], wanted=self._dtype), shape=part.shape)
            for name, ((ours, part), *_) in self._sources.items()
        ]

    def holder(self, name: str) -> int:
        """Returns a rank that holds some of the tensor."""
        ours, _ = self._sources[name][0]
        return next(iter(self._shards[ours]))

    def collect(self, entry: Entry, *, at: int) -> Tensor | None:
        """Returns the complete tensor on the CPU of rank `at`, None on the others."""
        complete = torch.empty(entry.shape, dtype=entry.torch_dtype) if self._rank == at else None
        for ours, part in self._sources[entry.name]:
            for holder, shard in self._shards[ours].items():
                overlap = part.overlap(shard.global_shape, offset=shard.offset, size=shard.size)
                if overlap is None:
                    continue
                if self._rank == holder:
                    values = overlap.in_box(self._local[ours].detach()).to(dtype=entry.torch_dtype).cpu()
                    if complete is None:
                        dist.send(bytes_of(values), dst=at, group=self.group)
                    else:
                        overlap.in_source(complete).copy_(values)
                elif complete is not None:
                    wanted = overlap.in_source(complete)
                    values = torch.empty(wanted.shape, dtype=wanted.dtype)
                    dist.recv(bytes_of(values), src=holder, group=self.group)
                    wanted.copy_(values)
        return complete


def _without_replicas(shards: Mapping[int, TensorShard]) -> dict[int, TensorShard]:
    """Returns the nonempty shards, each of the first rank that holds it."""
    chosen: dict[tuple[int, ...], int] = {}
    for rank, shard in sorted(shards.items()):
        if prod(shard.size) or not prod(shard.global_shape):
            chosen.setdefault(shard.offset, rank)
    unique = {rank: shards[rank] for rank in chosen.values()}
    global_shape = next(iter(unique.values())).global_shape
    assert sum(prod(shard.size) for shard in unique.values()) == prod(global_shape), f"shards are missing: {unique}"
    return unique


def _export(folder: Path, *, gather: FullTensorGather, layout: Layout, files: GetFiles) -> str | None:
    partial, leads = _partial_folder(folder), dist.get_rank() == 0
    error = _disk_error(lambda: _make_folder(partial, files=files())) if leads else None
    error = first_error(error, group=gather.group)
    if error is not None:
        return error
    for name, entries in layout.items():
        problem = _write_gathered(partial / name, entries=entries, gather=gather)
        error = error or problem
    error = first_error(error, group=gather.group)
    if leads and error is None:
        error = _disk_error(lambda: _commit_folder(folder, layout=layout))
    if leads and error is not None:
        shutil.rmtree(partial, ignore_errors=True)
    return first_error(error, group=gather.group)


def _write_gathered(path: Path, *, entries: Entries, gather: FullTensorGather) -> str | None:
    """Writes one file on a rank that holds a shard of its first tensor; returns that rank's error."""
    writer_rank = gather.holder(entries[0].name)
    tensors = (gather.collect(entry, at=writer_rank) for entry in entries)
    error = None
    if dist.get_rank() == writer_rank:
        complete = cast("Iterator[Tensor]", tensors)
        error = _disk_error(lambda: tensor_file.write_tensor_file(path, entries=entries, tensors=complete))
    # The other ranks send their shards; after an error, the writer must still receive them.
    for _ in tensors:
        pass
    return error


def write_weights(
    folder: Path, *, entries: Entries, read: Callable[[Entry], Tensor], files: Files, file_bytes: int = FILE_BYTES
) -> None:
    """Writes a folder of weights in one process, which reads the tensors one by one. OSError if the disk fails."""
    layout, partial = plan_files(entries, file_bytes=file_bytes), _partial_folder(folder)
    foreign = (*_foreign_files(folder, has_weights=True), *_foreign_files(partial, has_weights=False))
    if foreign:
        raise FileExistsError(f"{foreign[0]} is no file of an export; give a new folder, or that of an export")
    try:
        _make_folder(partial, files=files)
        for name, group in layout.items():
            tensor_file.write_tensor_file(partial / name, entries=group, tensors=map(read, group))
        _commit_folder(folder, layout=layout)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # is there after a failure


def _foreign_files(folder: Path, *, has_weights: bool) -> Iterator[Path]:
    """Yields what is not of an export in a folder that one replaces."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    yield from (path for path in files if path.is_symlink() or not path.is_file() or path.suffix not in _SUFFIXES)
    if has_weights and not any(path.suffix == ".safetensors" for path in files):
        yield from files


def plan_files(entries: Entries, *, file_bytes: int) -> dict[str, list[Entry]]:
    """Returns the tensors of each file, in order; those with the largest items first, so that all are aligned."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.num_bytes for e in groups[-1]) + entry.num_bytes > file_bytes:
            groups.append([])
        groups[-1].append(entry)
    ordered = [sorted(group, key=lambda entry: -entry.item_bytes) for group in groups]
    if len(ordered) == 1:
        return {"model.safetensors": ordered[0]}
    return {f"model-{i:05}-of-{len(ordered):05}.safetensors": group for i, group in enumerate(ordered, start=1)}


def _total_bytes(layout: Layout) -> int:
    return sum(entry.num_bytes for entries in layout.values() for entry in entries)


def _partial_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _make_folder(folder: Path, *, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        write_file(folder / name, [content])


def _commit_folder(folder: Path, *, layout: Layout) -> None:
    """Adds the index, unless there is a single file of tensors; then renames the folder."""
    partial = _partial_folder(folder)
    if absent := [name for name in layout if not (partial / name).is_file()]:
        raise OSError(f"{partial} lacks {', '.join(absent)}, which other nodes wrote: the folder must be shared by all")
    if len(layout) > 1:
        weight_map = {entry.name: name for name, entries in layout.items() for entry in entries}
        index = {"metadata": {"total_size": _total_bytes(layout)}, "weight_map": weight_map}
        write_file(partial / INDEX_FILE, [json.dumps(index, indent=2).encode() + b"\n"])
    commit(partial, folder)


def _disk_error(action: Callable[[], object]) -> str | None:
    try:
        action()
    except (OSError, DocumentError) as error:
        return str(error)
    return None


def export_files(
    *, spec: ModelSpec, model_args: ModelArgs, tokenizer: Tokenizer, dtype: torch.dtype
) -> dict[str, bytes]:
    """Returns config.json, generation_config.json and the tokenizer's files. OSError if it is another tokenizer."""
    if model_args.mup_base_dim:
        rule = "the Hugging Face format has no model whose scores and logits are scaled by its width"
        raise ConfigError(f"model.args.mup_base_dim = {model_args.mup_base_dim}: {rule}")
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    name = str(dtype).removeprefix("torch.")
    # transformers 5 and vLLM read dtype, transformers 4 and other converters torch_dtype.
    config = {**format_of(spec).to_config(model_args), **special, "dtype": name, "torch_dtype": name}
    generation = {"_from_model_config": True, **special}
    if len(tokenizer.end_ids) > 1:
        generation = {**special, "eos_token_id": tokenizer.end_ids}
    files = {CONFIG_FILE: config, GENERATION_FILE: generation}
    written = {name: json.dumps(content, indent=2).encode() + b"\n" for name, content in files.items()}
    return tokenizer_files(tokenizer) | written
