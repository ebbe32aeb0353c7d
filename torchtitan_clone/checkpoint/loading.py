"""Reads tensors of a checkpoint into the tensors of a run, on any mesh; nothing in a checkpoint can run code.

With a process group, functions here are collectives over all ranks; without one, they serve a single process.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader, FileIO
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.commit import CorruptCheckpointError, reading
from torchtitan_clone.checkpoint.index import Index
from torchtitan_clone.checkpoint.tensor_file import bytes_of
from torchtitan_clone.comm.json_collectives import all_gather_json, optional_text
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import Value, escape, open_regular, shorten
from torchtitan_clone.ops.dtensor_shards import TensorShard, describe_shard, local_shard

logger = logging.getLogger("torchtitan_clone")

MAX_NAMES_SHOWN = 20


def load_tensors(folder: Path, state: Mapping[str, Tensor], *, index: Index) -> None:
    """Fills tensors that the checkpoint has with the same shape; errors as agreed_errors().

    The index must be that of `verify`: files are read where it says.
    """
    with agreed_errors(folder):
        _fill(folder, state, index=index)


@contextmanager
def agreed_errors(folder: Path) -> Iterator[None]:
    """Raises on all ranks what one raises: CorruptCheckpointError, ConfigError for OSError, or FileNotFoundError.

    The last one if rank 0, which lists the steps, does not find the folder: it was deleted. ConfigError also if another
    rank does not: its node does not share the folder. Collective.
    """
    corrupt = unusable = None
    try:
        yield
    except CorruptCheckpointError as error:
        corrupt = str(error)
    except (ConfigError, OSError) as error:
        unusable = str(error)
        if isinstance(error, OSError):
            unusable = f"{folder} cannot be read or changed: {error}; try again, or move it away to use an older step"
    corrupt, unusable = first_error(corrupt), first_error(unusable)
    if corrupt or unusable:
        absent = [rank for rank, exists in enumerate(_gather(os.path.lexists(folder))) if not exists.flag()]
        if 0 in absent:
            raise FileNotFoundError(f"{folder} does not exist")
        if absent and not unusable:
            rule = "all nodes must share job.dump_folder, and checkpoint.initial_load_path if it is set"
            unusable = f"rank 0 finds {folder}, but ranks {shorten(str(absent))} do not; {rule}"
    if unusable or corrupt:
        raise ConfigError(unusable) if unusable else CorruptCheckpointError(corrupt)


def _fill(folder: Path, state: Mapping[str, Tensor], *, index: Index) -> None:
    needed: dict[str, list[tuple[int, TensorShard, Tensor, TensorShard]]] = {}
    for name, tensor in state.items():
        wanted = describe_shard(tensor)
        for file, begin, saved in index[name].shards:
            if wanted.overlap(saved) is not None:
                needed.setdefault(file, []).append((begin, saved, local_shard(tensor).detach(), wanted))
    for file, shards in needed.items():
        with reading(file), BufferedReader(open_regular(folder / file)) as stream:
            for begin, saved, target, wanted in shards:
                if not _read(stream, begin=begin, saved=saved, target=target, wanted=wanted):
                    raise CorruptCheckpointError(f"{file} ends early")


def _read(
    stream: "BufferedReader[FileIO]", *, begin: int, saved: TensorShard, target: Tensor, wanted: TensorShard
) -> bool:
    """Reads the rows that both shards hold, directly into the target if its memory layout allows; returns if it can."""
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


def loadable_tensors(
    folder: Path, state: Mapping[str, Tensor], *, index: Index, is_checked: Callable[[str], bool], allow_partial: bool
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


def _of_all_ranks(found: list[str]) -> list[str]:
    return sorted({name.text() for names in _gather(found) for name in names.items()})


def first_error(error: str | None, *, group: dist.ProcessGroup | None = None) -> str | None:
    """Returns the error of the first rank that has one, on all ranks. Collective."""
    errors = [optional_text(each) for each in _gather(error, group=group)]
    return next((each for each in errors if each is not None), None)


def _gather(value: object, *, group: dist.ProcessGroup | None = None) -> list[Value]:
    return all_gather_json(value, group=group) if dist.is_initialized() else [Value(value, where="value")]
