"""Chooses, verifies and loads a checkpoint, on any mesh; nothing in a checkpoint can run code.

With a process group, functions here are collectives over all ranks; without one, they serve a single process.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint import folder as folders
from torchtitan_clone.checkpoint.agree import (
    Places,
    Steps,
    agree_on_steps,
    agreed_errors,
    gather,
    set_aside,
    set_newer_aside,
)
from torchtitan_clone.checkpoint.folder import CorruptCheckpointError, Manifest, Place
from torchtitan_clone.checkpoint.format import (
    EMA,
    INDEX_FILE,
    MAX_STATE_BYTES,
    MODEL,
    OFFSETS_KEY,
    OPTIMIZER,
    OUTER,
    RNG,
    Index,
    check_parts,
    is_random_state,
    read_index,
    set_random_state,
)
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.checkpoint.tensor_file import NAMES, bytes_of, header_of
from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.config.started import as_started
from torchtitan_clone.documents import MAX_BYTES, escape, parse_json
from torchtitan_clone.ops.dtensor_shards import TensorShard, describe_shard, local_shard

logger = logging.getLogger("torchtitan_clone")

MAX_NAMES_SHOWN = 20
TENSOR_FILES = ".safetensors"
Parts = dict[str, tuple[int, TensorShard]]
"""First byte and shard of the tensors in one file, by name."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A verified checkpoint, and the groups of tensors to load from it; `progress` is None if the run starts anew."""

    folder: Place
    index: Index
    groups: tuple[str, ...]
    progress: Progress | None


def find_resume_point(checkpoint: Checkpoint, *, places: Places, steps: Steps) -> ResumePoint | None:
    """Returns the newest intact one of the steps to resume from, or initial_load_path. Collective.

    Of a step that is also in an object store, the local one comes first. ConfigError if what is asked for cannot be
    loaded.
    """
    folder, remote = places.folder, places.remote
    found = [(step, folder) for step in steps.to_resume if step in steps.local]
    found += [(step, remote) for step in steps.to_resume if step in steps.stored and remote is not None]
    for step, tier in sorted(found, key=lambda each: (-each[0], each[1] is not folder)):
        source = folders.step_folder(tier, step) if isinstance(tier, Path) else tier.step(step)
        digests = checkpoint.verify == "full"
        try:
            if tier is folder and places.peers is not None:  # which verify digests, each node its own
                places.peers.complete(folder, step=step, digests=digests)
                digests = False
            index = verify(source, step=step, digests=digests)
            with agreed_errors(source):
                progress = folders.progress_to_resume(source, checkpoint=checkpoint)
        except FileNotFoundError:  # another replica group has deleted it
            return find_resume_point(checkpoint, places=places, steps=agree_on_steps(checkpoint, places=places))
        except CorruptCheckpointError as problem:
            set_aside(step, folder=tier, places=places, checkpoint=checkpoint, problem=str(problem))
            continue
        if not checkpoint.load_only:
            set_newer_aside(step, places=places, checkpoint=checkpoint)
        return ResumePoint(folder=source, index=index, groups=(MODEL, OPTIMIZER, OUTER, EMA, RNG), progress=progress)
    if checkpoint.enable and checkpoint.load_step != -1:
        available = ", ".join(map(str, steps.committed)) or "none"
        what = f"checkpoint.load_step = {checkpoint.load_step}: {folder} has no complete checkpoint of this step"
        raise ConfigError(f"{what}; saved steps: {available}; choose one of them, or -1 for the newest")
    if steps.had_any and not checkpoint.start_fresh:
        remedy = "restore one, or set checkpoint.start_fresh = true to train from the first step"
        raise ConfigError(f"{folder}: no checkpoint is complete, for the reasons logged above; {remedy}")
    return _initial_point(checkpoint)


def _initial_point(checkpoint: Checkpoint) -> ResumePoint | None:
    if (initial := folders.initial_folder(checkpoint)) is None:
        return None
    folder, step = initial
    try:
        index = verify(folder, step=step, digests=checkpoint.verify == "full")
        with agreed_errors(folder):
            progress = folders.progress_to_resume(folder, checkpoint=checkpoint)
    except (CorruptCheckpointError, FileNotFoundError) as problem:
        why = f"{folder} is corrupted: {problem}; copy it again or choose another one"
        raise ConfigError(f"checkpoint.initial_load_path: {why}") from None
    if checkpoint.initial_load_model_only:
        return ResumePoint(folder=folder, index=index, groups=(MODEL,), progress=None)
    return ResumePoint(folder=folder, index=index, groups=(MODEL, OPTIMIZER, EMA, RNG), progress=progress)


def load_resume_point(point: ResumePoint, *, checkpoint: Checkpoint, state: dict[str, Tensor]) -> bool:
    """Fills the tensors of the point's groups, except excluded ones. Collective. ConfigError if they do not match.

    Returns False if the checkpoint was deleted, as by another replica group that has saved newer ones.
    """
    excluded = tuple(f"{name.rstrip('/')}/" for name in checkpoint.exclude_from_loading)
    groups = _groups_of_both(point, state=state)

    def is_loaded(name: str) -> bool:
        return name.startswith(groups) and not f"{name}/".startswith(excluded)

    def is_checked(name: str) -> bool:  # the number of ranks, each with its own random state, may have changed
        return is_loaded(name) and not name.startswith(RNG)

    _check_excluded(checkpoint.exclude_from_loading, names={*state, *point.index})
    wanted = {name: tensor for name, tensor in state.items() if is_loaded(name)}
    try:
        tensors = loadable_tensors(
            point.folder, wanted, index=point.index, is_checked=is_checked, allow_partial=checkpoint.allow_partial
        )
        load_tensors(point.folder, tensors, index=point.index)
    except FileNotFoundError:
        return False
    except CorruptCheckpointError as error:
        if not isinstance(point.folder, Path):
            raise
        remedy = f"move {point.folder.name} out of its folder to use an older checkpoint"
        if checkpoint.verify == "sizes":
            remedy = 'set checkpoint.verify = "full" to check all bytes first and fall back to an older step'
        raise ConfigError(f"{point.folder}: {error}; {remedy}") from None
    set_random_state(tensors)
    loaded = " and ".join(group.rstrip("/") for group in groups if group != RNG)
    logger.info("loaded %s from %s", loaded, point.folder)
    if point.progress is not None:
        logger.info("resumed after step %d", point.progress.step)
        if checkpoint.load_step not in (-1, point.progress.step):
            logger.info("this run was rewound to checkpoint.load_step = %d before", checkpoint.load_step)
    return True


def _groups_of_both(point: ResumePoint, *, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the groups of tensors to load: averages of the weights only if checkpoint and run have some."""
    is_kept, is_saved = (any(name.startswith(EMA) for name in names) for names in (state, point.index))
    if is_kept and not is_saved:
        logger.info("%s has no averages of the weights: they start at its weights", point.folder)
    elif is_saved and EMA in point.groups and not is_kept:
        logger.warning("the averages in %s are not loaded, and end here: ema.enable is false", point.folder)
    return tuple(group for group in point.groups if group != EMA or (is_kept and is_saved))


def _check_excluded(excluded: Sequence[str], *, names: Set[str]) -> None:
    """ConfigError for an excluded tensor that neither the checkpoint nor any rank has. Collective."""
    tensors = [name.rstrip("/") for name in excluded if "/" in name.rstrip("/")]
    if not tensors:
        return
    exists = [any(f"{name}/".startswith(f"{tensor}/") for name in names) for tensor in tensors]
    answers = [answer.items(count=len(exists)) for answer in all_gather_json(exists)]
    for tensor, *exists_on_ranks in zip(tensors, *answers, strict=True):
        if not any(each.flag() for each in exists_on_ranks):
            remedy = as_started("name one that scripts/checkpoint.py show lists")
            rule = f"neither the checkpoint nor this run has this tensor; {remedy}"
            raise ConfigError(f"checkpoint.exclude_from_loading = [{shown(tensor)}]: {rule}")


def verify(folder: Place, *, step: int | None, digests: bool) -> Index:
    """Returns the tensors of a checkpoint, if it is intact; errors as agreed_errors(). Collective.

    `digests` checks the bytes of tensors too. Without them it is still certain that every element of every tensor is
    in the files once, that each file has the tensors that the index says, and that no document contradicts another.
    Tensors in an object store are verified while they are loaded, so that they are read once.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    index: Index = {}
    with agreed_errors(folder):
        manifest = folders.check_sizes(folder, step=step)
        index = read_index(folder, manifest=manifest)
        for name in list(index)[rank::world_size]:
            check_parts(name, index[name])
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        dealt = by_size[rank::world_size]  # in turn, to balance the reading
        parts = _parts_of_files(index, files=[name for name in dealt if name.endswith(TENSOR_FILES)])
        for name in dealt:
            if name in parts:
                _check_tensor_file(folder, name, parts=parts[name])
            _check_bytes(folder, name, manifest=manifest, digests=digests and isinstance(folder, Path))
        if stray := {
            file for tensor in index.values() for file, *_ in tensor.shards if not file.endswith(TENSOR_FILES)
        }:
            raise CorruptCheckpointError(f"{INDEX_FILE}: {min(stray)} is no file of tensors")
    return index


def _parts_of_files(index: Index, *, files: list[str]) -> dict[str, Parts]:
    parts: dict[str, Parts] = {file: {} for file in files}
    for name, tensor in index.items():
        for file, begin, shard in tensor.shards:
            if file not in parts:
                continue
            if name in parts[file]:
                raise CorruptCheckpointError(f"{INDEX_FILE}: {escape(name)} has two parts in {file}")
            parts[file][name] = (begin, shard)
    return parts


def _check_bytes(folder: Place, name: str, *, manifest: Manifest, digests: bool) -> None:
    """Compares the digest of a file, unless it was compared when the file was read."""
    if name in (folders.PROGRESS_FILE, INDEX_FILE):
        return
    is_document = not name.endswith(TENSOR_FILES)
    if is_document and manifest.files[name].bytes > MAX_BYTES:
        raise CorruptCheckpointError(f"{name} has {manifest.files[name].bytes:,} bytes, too many for a document")
    if is_document or digests:
        folders.check_digest(folder, name, manifest=manifest)


def _check_tensor_file(folder: Place, file: str, *, parts: Parts) -> None:
    """Compares the header of a file with the index, in both directions."""
    with folders.reading(file), folders.open_file(folder, file) as stream:
        header = header_of(stream, where=file)
        # Stated for torch's reader.
        offsets = parse_json(header.metadata.get(OFFSETS_KEY, "{}"), where=f"{file}: {OFFSETS_KEY}").plain_entries()
    if header.entries.keys() != parts.keys():
        name = min(header.entries.keys() ^ parts.keys())
        raise CorruptCheckpointError(f"{file} and {INDEX_FILE} disagree: {escape(name)} is in one of them only")
    for name, (begin, shard) in parts.items():
        entry = header.entries[name]
        saved = (entry.dtype, entry.shape, header.begins[name], offsets.get(name))
        if saved != (NAMES[shard.dtype], shard.size, begin, {"saved_offsets": [*shard.offset]}):
            raise CorruptCheckpointError(f"{file} and {INDEX_FILE} disagree about {escape(name)}")
        if name.startswith(RNG):
            _check_random_state(folder, file, name=name, part=(begin, shard))


def _check_random_state(folder: Place, file: str, *, name: str, part: tuple[int, TensorShard]) -> None:
    begin, shard = part
    is_state = shard.dtype is torch.uint8 and shard.size == shard.global_shape and len(shard.size) == 1
    if is_state and 0 < shard.size[0] <= MAX_STATE_BYTES:
        with folders.reading(file), folders.open_file(folder, file) as stream:
            stream.seek(begin)
            state = torch.frombuffer(bytearray(stream.read(shard.size[0])), dtype=torch.uint8)
        if is_random_state(name, state=state):
            return
    raise CorruptCheckpointError(f"{file}: {escape(name)} is not the state of a random number generator")


def loadable_tensors(
    folder: Place, state: Mapping[str, Tensor], *, index: Index, is_checked: Callable[[str], bool], allow_partial: bool
) -> dict[str, Tensor]:
    """Returns the tensors of `state` that the checkpoint has with the same shape.

    ConfigError, or a warning if `allow_partial`, if checked names are not on both sides with one shape and dtype.
    """
    checked = {name: tensor for name, tensor in state.items() if is_checked(name)}
    shapes: list[str] = []
    dtypes: list[str] = []
    for name in checked.keys() & index.keys():
        saved = index[name]
        wanted = checked[name]
        if saved.shape != wanted.shape:
            shapes.append(f"{name} {tuple(saved.shape)} -> {tuple(wanted.shape)}")
        elif saved.dtype != wanted.dtype:
            dtypes.append(f"{name} {str(saved.dtype)[6:]} -> {str(wanted.dtype)[6:]}")
    mismatches = {
        "missing in the checkpoint": _missing(checked, index),
        "only in the checkpoint": _unused([name for name in index if is_checked(name)], checked),
        "different shape": _of_all_ranks(shapes),
        "different dtype": _of_all_ranks(dtypes),
    }
    texts = [f"{kind}: {_listed(names)}" for kind, names in mismatches.items() if names]
    loaded = "tensors of the same name and shape, converted to this run's dtype"
    if texts and not allow_partial:
        what = f"the checkpoint {folder} does not match this run's model and optimizer; {'; '.join(texts)}"
        remedy = f"set checkpoint.allow_partial = true to load {loaded} and initialize the rest"
        raise ConfigError(f"{what}. Restore the options that it was saved with, or {remedy}")
    if texts:
        logger.warning("%s does not match; checkpoint.allow_partial loads %s; %s", folder, loaded, "; ".join(texts))
    return {name: t for name, t in state.items() if name in index and index[name].shape == t.shape}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"{escape(', '.join(names[:MAX_NAMES_SHOWN]))}{more}"


def _missing(state: Mapping[str, Tensor], index: Collection[str]) -> list[str]:
    """Returns the names that the checkpoint lacks, but not the optimizer state of parameters that were frozen."""
    trained = {_parameter_of(name) for name in index}
    absent = _of_all_ranks([name for name in state if name not in index])
    frozen = {_parameter_of(name) for name in absent if len(trained) > 1 and _parameter_of(name) not in trained}
    if frozen:
        text = "%d parameters were frozen when this checkpoint was saved: their optimizer state starts from zero"
        logger.warning(text, len(frozen))
    return [name for name in absent if _parameter_of(name) not in frozen]


def _parameter_of(name: str) -> str:
    """Returns the parameter in a name "optimizer/parameter/key"; "" for other names."""
    return name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else ""


def _unused(names: list[str], state: Mapping[str, Tensor]) -> list[str]:
    """Returns the names that no rank has in its state, but not the optimizer state of frozen parameters."""
    trained = {_parameter_of(name) for name in state}
    frozen = {name.removeprefix("model/") for name in state if name.startswith("model/")} - trained
    used = torch.tensor([name in state or _parameter_of(name) in frozen for name in names], dtype=torch.uint8)
    if dist.is_initialized() and len(names):
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
    return sorted(name for name, is_used in zip(names, used.tolist(), strict=True) if not is_used)


def _of_all_ranks(names: list[str]) -> list[str]:
    return sorted({name.text() for each in gather(names) for name in each.items()})


def load_tensors(folder: Place, state: Mapping[str, Tensor], *, index: Index) -> None:
    """Fills tensors that the checkpoint has with the same shape; errors as agreed_errors().

    The index must be that of `verify`: files are read where it says.
    """
    needed: dict[str, list[tuple[int, TensorShard, Tensor, TensorShard]]] = {}
    for name, tensor in state.items():
        wanted = describe_shard(tensor)
        for file, begin, saved in index[name].shards:
            if wanted.overlap(saved) is not None:
                needed.setdefault(file, []).append((begin, saved, local_shard(tensor).detach(), wanted))
    with agreed_errors(folder):
        for file, shards in needed.items():
            with folders.reading(file), folders.open_file(folder, file) as stream:
                for begin, saved, target, wanted in sorted(shards, key=lambda shard: shard[0]):
                    if not _read(stream, begin=begin, saved=saved, target=target, wanted=wanted):
                        raise CorruptCheckpointError(f"{file} ends early")


def _read(stream: BufferedReader, *, begin: int, saved: TensorShard, target: Tensor, wanted: TensorShard) -> bool:
    """Reads the rows that both shards hold, directly into the target if its memory layout allows; returns if it can."""
    # In a file, only complete rows are contiguous. Those with the region are read, and its columns are copied:
    #
    #     saved shard, in the file           wanted shard, in memory
    #     +-----------------+  <- begin
    #     |                 |                +-----------------+
    #     |.......+---------+  <- seek       |                 |
    #     |.......| region  |                +---------+       |
    #     |.......+---------+  <- end        | region  |       |
    #     +-----------------+                +---------+-------+
    region = wanted.overlap(saved)
    assert region is not None
    overlap = target[wanted.window(region)]
    window = saved.window(region)
    shape = [window[0].stop - window[0].start, *saved.size[1:]] if window else []
    is_direct = overlap.is_cpu and overlap.is_contiguous() and (overlap.dtype, [*overlap.shape]) == (saved.dtype, shape)
    rows = overlap if is_direct else torch.empty(shape, dtype=saved.dtype)
    stream.seek(begin + (window[0].start * prod(shape[1:]) * saved.dtype.itemsize if window else 0))
    buffer = bytes_of(rows).numpy().data
    if stream.readinto(buffer) != buffer.nbytes:
        return False
    if not is_direct:
        overlap.copy_(rows[(slice(None), *window[1:])] if window else rows)
    return True
