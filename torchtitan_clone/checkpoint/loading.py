"""Reading tensors of a checkpoint into those of a run, whichever mesh either has.

torch.distributed.checkpoint's planner finds out which bytes a rank needs; the reader here fetches them. What is read is
numbers and JSON: nothing in a checkpoint can run code. With a process group everything here is a collective over all
ranks; without one it is for a process alone.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

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

from torchtitan_clone.checkpoint.commit import DamagedError
from torchtitan_clone.checkpoint.layout import INDEX_FILE
from torchtitan_clone.checkpoint.tensor_file import DTYPES
from torchtitan_clone.config import ConfigError

logger = logging.getLogger("torchtitan_clone")

MOST_NAMES_SHOWN = 20


class CheckpointReader(StorageReader):
    """What torch.distributed.checkpoint asks to read a checkpoint folder. DamagedError where the index is no index."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._parts: dict[MetadataIndex, tuple[str, int, torch.dtype, list[int]]] = {}
        self._known: Metadata | None = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The index, in torch's words."""
        self._known = self._known or self._read_index()
        return self._known

    def _read_index(self) -> Metadata:
        tensors = read_index(self._folder)
        try:
            return Metadata({name: self._metadata(name, entry) for name, entry in tensors.items()})
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{INDEX_FILE} is torn: {error}") from None

    def _metadata(self, name: str, entry: Mapping[str, Any]) -> TensorStorageMetadata:
        dtype, size, chunks = DTYPES[entry["dtype"]], torch.Size(entry["shape"]), []
        for offsets, sizes, file, begin in entry["parts"]:
            self._parts[MetadataIndex(name, torch.Size(offsets))] = (file, begin, dtype, sizes)
            chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """All is known since the metadata was read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of this rank, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._parts[item.storage_index][0], []).append(item)
        for file, items in by_file.items():
            with (self._folder / file).open("rb") as stream:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    self._read(stream, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: BufferedReader, item: ReadItem, target: Tensor) -> None:
        """Reads the rows of the saved part that are asked for, straight to their place where that is possible."""
        file, begin, dtype, sizes = self._parts[item.storage_index]
        shape = [item.lengths[0], *sizes[1:]] if sizes else []
        if shape:
            begin += item.storage_offsets[0] * prod(shape[1:]) * dtype.itemsize
        direct = target.is_cpu and target.is_contiguous() and target.dtype == dtype and list(target.shape) == shape
        rows = target if direct else torch.empty(shape, dtype=dtype)
        stream.seek(begin)
        buffer: Any = rows.view(-1).view(torch.uint8).numpy()
        if stream.readinto(buffer) != buffer.nbytes:
            raise DamagedError(f"{file} ends early")
        if not direct:
            for dim in range(1, len(shape)):
                rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            target.copy_(rows)

    def reset(self, checkpoint_id: Any = None) -> None:
        """One reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """torch asks this only where it looks for a reader itself."""
        return isinstance(checkpoint_id, Path)


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """Of every tensor of a checkpoint its "dtype", "shape" and "parts"; DamagedError where the file is no index."""
    try:
        tensors = json.loads((folder / INDEX_FILE).read_bytes())["tensors"]
    except OSError as error:
        raise DamagedError(f"{INDEX_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{INDEX_FILE} is torn: {error}") from None
    return tensors


def load_tensors(folder: Path, state: dict[str, Tensor], *, reader: CheckpointReader | None = None) -> None:
    """Fills the tensors of `state`, all of which the checkpoint must have; DamagedError where it cannot be read.

    A reader that is given again need not read the index again.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # That there is no process group is no news.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = reader or CheckpointReader(folder)
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                raise DamagedError(f"{Path(cause.filename or folder).name} cannot be read: {cause.strerror}") from None
            if isinstance(cause, DamagedError):
                raise cause from None
        raise


def read_tensors(folder: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint on the CPU, all or those of these names; for scripts, without a process group."""
    index = read_index(folder)
    wanted = list(index) if names is None else list(names)
    state = {name: torch.empty(index[name]["shape"], dtype=DTYPES[index[name]["dtype"]]) for name in wanted}
    load_tensors(folder, state)
    return state


def matching(
    folder: Path, state: Mapping[str, Tensor], *, counts: Callable[[str], bool], allow_partial: bool
) -> dict[str, Tensor]:
    """The tensors of `state` that the checkpoint can fill.

    The rest is drift, of names that `counts`: names that only one side has, other shapes, other types. ConfigError with
    all of it, unless allow_partial, which lists it in the log.
    """
    index = read_index(folder)
    checked = {name: tensor for name, tensor in state.items() if counts(name)}
    shapes, dtypes = [], []
    for name in checked.keys() & index.keys():
        saved, wanted = index[name], checked[name]
        if saved["shape"] != list(wanted.shape):
            shapes.append(f"{name} {tuple(saved['shape'])} -> {tuple(wanted.shape)}")
        elif DTYPES[saved["dtype"]] != wanted.dtype:
            dtypes.append(f"{name} {str(DTYPES[saved['dtype']])[6:]} -> {str(wanted.dtype)[6:]}")
    drift = {
        "missing in the checkpoint": _missing(checked, index),
        "only in the checkpoint": _unused([name for name in index if counts(name)], checked),
        "of another shape": _over_ranks(shapes),
        "of another type": _over_ranks(dtypes),
    }
    _refuse_or_tell(folder, {kind: names for kind, names in drift.items() if names}, allow_partial=allow_partial)
    return {name: t for name, t in state.items() if name in index and index[name]["shape"] == list(t.shape)}


def _missing(state: Mapping[str, Tensor], index: Mapping[str, Any]) -> list[str]:
    """Names that the checkpoint lacks; but a parameter without any optimizer state there was frozen then."""
    learnt = {_parameter_of(name) for name in index}
    absent = _over_ranks([name for name in state if name not in index])
    frozen = {_parameter_of(name) for name in absent if len(learnt) > 1 and _parameter_of(name) not in learnt}
    if frozen:
        logger.warning(
            "%d parameters were frozen when this was saved: their optimizer states start from zero", len(frozen)
        )
    return [name for name in absent if _parameter_of(name) not in frozen]


def _parameter_of(name: str) -> str:
    """The parameter that a name "optimizer/parameter/key" belongs to; "" for other names."""
    return name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else ""


def _refuse_or_tell(folder: Path, drift: Mapping[str, Sequence[str]], *, allow_partial: bool) -> None:
    if not drift:
        return
    texts = []
    for kind, names in drift.items():
        more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
        texts.append(f"{kind}: {', '.join(names[:MOST_NAMES_SHOWN])}{more}")
    if not allow_partial:
        raise ConfigError(
            f"the checkpoint {folder} does not fit this model and optimizer; {'; '.join(texts)}. Put the options back, "
            "or set checkpoint.allow_partial = true to load what fits and start the rest anew"
        )
    logger.warning("%s does not fit, which checkpoint.allow_partial accepts; %s", folder, "; ".join(texts))


def _over_ranks(found: list[str]) -> list[str]:
    """What any rank has found, without repetition."""
    if not dist.is_initialized():
        return sorted(found)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return sorted({name for names in everywhere for name in names})


def _unused(names: list[str], state: Mapping[str, Tensor]) -> list[str]:
    """Names of the checkpoint that no rank has; all ranks give the same names in the same order.

    Optimizer state of a parameter that has none now is no drift: it is frozen.
    """
    learning = {_parameter_of(name) for name in state}
    frozen = {name.removeprefix("model/") for name in state if name.startswith("model/")} - learning
    used = torch.tensor([name in state or _parameter_of(name) in frozen for name in names], dtype=torch.uint8)
    if dist.is_initialized() and len(names):
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
    return sorted(name for name, is_used in zip(names, used.tolist(), strict=True) if not is_used)
