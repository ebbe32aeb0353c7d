"""Reads tensors of a checkpoint into the tensors of a run, on any mesh.

The planner of torch.distributed.checkpoint finds out which bytes a rank needs; the reader here fetches them. Only
numbers and JSON are read: nothing in a checkpoint can run code. With a process group, functions here are collectives
over all ranks; without one, they serve a single process.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan_clone.checkpoint.commit import CorruptCheckpointError
from torchtitan_clone.checkpoint.layout import INDEX_FILE, IndexEntry
from torchtitan_clone.checkpoint.tensor_file import DTYPES
from torchtitan_clone.config import ConfigError

logger = logging.getLogger("torchtitan_clone")

MAX_NAMES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class SavedShard:
    """A shard of a tensor on disk: its file, its first byte there, and its type and shape."""

    file: str
    begin: int
    dtype: torch.dtype
    shape: Sequence[int]


class CheckpointReader(StorageReader):
    """Reads a checkpoint folder for torch.distributed.checkpoint. CorruptCheckpointError if the index is not valid."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._shards: dict[MetadataIndex, SavedShard] = {}
        self._metadata: Metadata | None = None

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """Returns the index in torch's format."""
        self._metadata = self._metadata or self._read_index()
        return self._metadata

    def _read_index(self) -> Metadata:
        tensors = read_index(self._folder)
        try:
            return Metadata({name: self._convert(name, entry) for name, entry in tensors.items()})
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{INDEX_FILE} is not a valid index: {error}") from None

    def _convert(self, name: str, entry: IndexEntry) -> TensorStorageMetadata:
        dtype = DTYPES[entry["dtype"]]
        chunks: list[ChunkStorageMetadata] = []
        for offsets, sizes, file, begin in entry["parts"]:
            shard = SavedShard(file=file, begin=begin, dtype=dtype, shape=sizes)
            self._shards[MetadataIndex(name, torch.Size(offsets))] = shard
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        properties = TensorProperties(dtype=dtype)
        return TensorStorageMetadata(properties=properties, size=torch.Size(entry["shape"]), chunks=chunks)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: object, **_kwargs: object
    ) -> None:
        """Does nothing: `read_metadata` has set up everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of this rank, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._shards[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with (self._folder / file).open("rb") as stream:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    _read(stream, item, shard=self._shards[item.storage_index], target=target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether the id is a path; torch calls this only when it chooses a reader itself."""
        return isinstance(checkpoint_id, Path)


def _read(stream: BufferedReader, item: ReadItem, *, shard: SavedShard, target: Tensor) -> None:
    """Reads the requested rows of a saved shard, directly into the target if its memory layout allows."""
    shape = [item.lengths[0], *shard.shape[1:]] if shard.shape else []
    row_bytes = prod(shape[1:]) * shard.dtype.itemsize
    is_direct = target.is_cpu and target.is_contiguous() and target.dtype == shard.dtype and list(target.shape) == shape
    rows = target if is_direct else torch.empty(shape, dtype=shard.dtype)
    stream.seek(shard.begin + (item.storage_offsets[0] * row_bytes if shape else 0))
    buffer = rows.view(-1).view(torch.uint8).numpy().data
    if stream.readinto(buffer) != buffer.nbytes:
        raise CorruptCheckpointError(f"{shard.file} ends early")
    if not is_direct:
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target.copy_(rows)


def read_index(folder: Path) -> dict[str, IndexEntry]:
    """Returns the index of a checkpoint by tensor name; CorruptCheckpointError if the file is not valid."""
    try:
        return json.loads((folder / INDEX_FILE).read_bytes())["tensors"]
    except OSError as error:
        raise CorruptCheckpointError(f"{INDEX_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{INDEX_FILE} is not a valid index: {error}") from None


def load_tensors(folder: Path, state: dict[str, Tensor], *, reader: CheckpointReader | None = None) -> None:
    """Fills the tensors of `state`, all of which the checkpoint must have; CorruptCheckpointError if it is unreadable.

    Pass the `reader` of an earlier call to read the index only once.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # A missing process group is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = reader or CheckpointReader(folder)
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                name = Path(cause.filename or folder).name
                raise CorruptCheckpointError(f"{name} cannot be read: {cause.strerror}") from None
            if isinstance(cause, CorruptCheckpointError):
                raise cause from None
        raise


def read_tensors(folder: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Returns full tensors of a checkpoint on the CPU, all or those of these names; needs no process group."""
    index = read_index(folder)
    wanted = list(index) if names is None else list(names)
    state = {name: torch.empty(index[name]["shape"], dtype=DTYPES[index[name]["dtype"]]) for name in wanted}
    load_tensors(folder, state)
    return state


def loadable_tensors(
    folder: Path, state: Mapping[str, Tensor], *, is_checked: Callable[[str], bool], allow_partial: bool
) -> dict[str, Tensor]:
    """Returns the tensors of `state` that the checkpoint has with the same shape.

    Names for which `is_checked` is true must also match: both sides have them, with the same shape and dtype. Otherwise
    raises ConfigError with all mismatches, or logs them if `allow_partial`.
    """
    index = read_index(folder)
    checked = {name: tensor for name, tensor in state.items() if is_checked(name)}
    shapes: list[str] = []
    dtypes: list[str] = []
    for name in checked.keys() & index.keys():
        saved = index[name]
        wanted = checked[name]
        if saved["shape"] != list(wanted.shape):
            shapes.append(f"{name} {tuple(saved['shape'])} -> {tuple(wanted.shape)}")
        elif DTYPES[saved["dtype"]] != wanted.dtype:
            dtypes.append(f"{name} {str(DTYPES[saved['dtype']])[6:]} -> {str(wanted.dtype)[6:]}")
    mismatches = {
        "missing in the checkpoint": _missing(checked, index),
        "only in the checkpoint": _unused([name for name in index if is_checked(name)], checked),
        "different shape": _over_ranks(shapes),
        "different dtype": _over_ranks(dtypes),
    }
    found = {kind: names for kind, names in mismatches.items() if names}
    if found:
        _refuse_or_warn(folder, found, allow_partial=allow_partial)
    return {name: t for name, t in state.items() if name in index and index[name]["shape"] == list(t.shape)}


def _missing(state: Mapping[str, Tensor], index: Collection[str]) -> list[str]:
    """Returns the names that the checkpoint lacks.

    Leaves out the optimizer state of parameters that have none at all in the checkpoint: they were frozen.
    """
    trained = {_parameter_of(name) for name in index}
    absent = _over_ranks([name for name in state if name not in index])
    frozen = {_parameter_of(name) for name in absent if len(trained) > 1 and _parameter_of(name) not in trained}
    if frozen:
        logger.warning(
            "%d parameters were frozen when this checkpoint was saved: their optimizer state starts from zero",
            len(frozen),
        )
    return [name for name in absent if _parameter_of(name) not in frozen]


def _parameter_of(name: str) -> str:
    """Returns the parameter in a name "optimizer/parameter/key"; "" for other names."""
    return name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else ""


def _refuse_or_warn(folder: Path, mismatches: Mapping[str, Sequence[str]], *, allow_partial: bool) -> None:
    texts: list[str] = []
    for kind, names in mismatches.items():
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        texts.append(f"{kind}: {', '.join(names[:MAX_NAMES_SHOWN])}{more}")
    text = "; ".join(texts)
    if not allow_partial:
        raise ConfigError(
            f"the checkpoint {folder} does not match this run's model and optimizer; {text}. Restore the options that "
            "it was saved with, or set checkpoint.allow_partial = true to load what matches and initialize the rest"
        )
    logger.warning("%s does not match, which checkpoint.allow_partial accepts; %s", folder, text)


def _over_ranks(found: list[str]) -> list[str]:
    """Returns what any rank has found, without duplicates. Collective."""
    if not dist.is_initialized():
        return sorted(found)
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return sorted({name for names in gathered for name in names})


def _unused(names: list[str], state: Mapping[str, Tensor]) -> list[str]:
    """Returns the names that no rank has in its state. Collective: all ranks pass the same names in the same order.

    Leaves out the optimizer state of parameters that have none in this run: they are frozen.
    """
    trained = {_parameter_of(name) for name in state}
    frozen = {name.removeprefix("model/") for name in state if name.startswith("model/")} - trained
    used = torch.tensor([name in state or _parameter_of(name) in frozen for name in names], dtype=torch.uint8)
    if dist.is_initialized() and len(names):
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
    return sorted(name for name, is_used in zip(names, used.tolist(), strict=True) if not is_used)
