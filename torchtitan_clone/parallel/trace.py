"""Counts the collectives of a step: how many, how many bytes, over which axis of the mesh, for which kind of layer."""

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from torchtitan_clone import torch_compat
from torchtitan_clone.parallel.context import context_attention, context_attention_backward
from torchtitan_clone.torch_compat import Operator, TorchDispatchMode, tree_leaves

logger = logging.getLogger("torchtitan_clone")

# Names of torch's operators, without the trailing underscore and the variants of one collective.
_COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast", "send": "send", "recv": "recv",
}  # fmt: skip
Kwargs = dict[str, object] | None


@dataclass(frozen=True, kw_only=True, order=True)
class Call:
    """One kind of collective; `implicit`: DTensor inserted it, because an operator does not support its layouts."""

    axis: str
    collective: str
    layer: str
    implicit: bool


def _name(func: Operator) -> str:
    return func.name().partition("::")[2].partition(".")[0]


def collective_name(func: Operator) -> str | None:
    """Returns which collective an operator is; None if it is none."""
    return _COLLECTIVES.get(_name(func).rstrip("_")) if func.namespace in ("c10d", "_c10d_functional") else None


class CollectiveTrace(TorchDispatchMode):
    """Counts the collectives that run inside it; `group_names` are Mesh.group_names()."""

    def __init__(self, group_names: Mapping[str, str]) -> None:
        super().__init__()
        self._group_names = group_names
        self._modules = ModuleTracker()
        self.counts: Counter[Call] = Counter()
        self.bytes: Counter[Call] = Counter()
        self.exposed: Counter[Call] = Counter()
        self._in_flight: dict[int, Call] = {}

    def __enter__(self) -> "CollectiveTrace":
        self._modules.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Operator, types: object, args: tuple = (), kwargs: Kwargs = None) -> object:
        name = _name(func)
        collective = collective_name(func)
        result = func(*args, **(kwargs or {}))
        if collective is not None:
            implicit = _called_from("redistribute_local_args")
            call = Call(axis=self._axis(args), collective=collective, layer=self._layer(), implicit=implicit)
            self.counts[call] += 1
            self.bytes[call] += max(map(_num_bytes, (*args, result)), default=0)
            self.exposed[call] += _is_waited_for(func, args)
            if func.namespace == "_c10d_functional":
                self._in_flight |= dict.fromkeys(_storages(result), call)
        elif name == "wait_tensor" or (func.namespace == "aten" and name != "view"):
            self._count_exposed(name, args)
        return result

    def _count_exposed(self, name: str, args: tuple) -> None:
        """Counts collectives whose result an operator reads; those in flight during a costly one are hidden."""
        self.exposed.update([self._in_flight.pop(each) for each in _storages(args) if each in self._in_flight])
        if name in ("mm", "addmm", "bmm", "linear") or "attention" in name:
            self._in_flight.clear()

    def rows(self) -> list[dict[str, object]]:
        """Returns one row for each kind of call.

        `bytes` is the size of the larger side. `exposed` counts calls that ended before a matrix product or attention
        began, so that nothing hides them; send and recv count as hidden.
        """
        return [
            {**vars(call), "count": count, "bytes": self.bytes[call], "exposed": self.exposed[call]}
            for call, count in sorted(self.counts.items())
        ]

    def table(self) -> str:
        """Returns the rows as text; implicit redistributions are marked."""
        lines = [f"{'axis':14}{'collective':16}{'layer':34}{'count':>7}{'exposed':>9}{'MiB':>12}"]
        for call, count in sorted(self.counts.items()):
            mark = "  implicit" if call.implicit else ""
            numbers = f"{count:7,}{self.exposed[call]:9,}{self.bytes[call] / 2**20:12,.2f}"
            lines.append(f"{call.axis:14}{call.collective:16}{call.layer:34}{numbers}{mark}")
        return "\n".join(lines)

    def _axis(self, args: tuple) -> str:
        for value in tree_leaves(args):
            if isinstance(value, torch.ScriptObject):
                value = dist.ProcessGroup.unbox(value).group_name
            if isinstance(value, str) and value in self._group_names:
                return self._group_names[value]
        return "?"

    def _layer(self) -> str:
        """Returns the name of the deepest module that runs, with numbers of layers as *."""
        names = [name for name in self._modules.parents if name != "Global"]
        deepest = max(names, key=len, default="")
        deepest = deepest.partition(".")[2] if "." in deepest else "optimizer and loss"
        for wrapper in torch_compat.WRAPPER_NAMES:
            deepest = deepest.replace(f".{wrapper}", "")
        return re.sub(r"\.\d+(?=\.|$)", ".*", deepest)


@contextmanager
def trace_collectives(enabled: bool, *, group_names: Mapping[str, str], rank: int, folder: Path) -> Iterator[None]:
    """Logs the collectives that run inside it as a table, and writes their rows to collectives.rank<rank>.json."""
    if not enabled:
        yield
        return
    with CollectiveTrace(group_names) as trace:
        yield
    for line in (f"collectives of one step of rank {rank}:", *trace.table().splitlines()):
        logger.info("%s", line)
    (folder / f"collectives.rank{rank}.json").write_text(json.dumps(trace.rows(), indent=1))


def see_context_attention(mode_class: type[TorchDispatchMode]) -> None:
    """Lets such a mode see the collectives inside the operators for context parallelism."""
    for operation in (context_attention, context_attention_backward):
        torch_compat.look_inside(operation, mode_class=mode_class)


see_context_attention(CollectiveTrace)


def _storages(argument: object) -> list[int]:
    return [torch_compat.storage_id(x) for x in tree_leaves(argument) if isinstance(x, Tensor)]


def _num_bytes(argument: object) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(argument) if isinstance(x, Tensor))


def _is_waited_for(func: Operator, args: tuple) -> bool:
    """Whether the stream of the computation is idle until the collective is done."""
    if dict(zip(torch_compat.argument_names(func), args, strict=False)).get("async_op", True):
        return False
    return not torch.cuda.is_initialized() or torch.cuda.current_stream() == torch.cuda.default_stream()


def _called_from(function: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
