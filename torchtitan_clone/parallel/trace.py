"""Which collectives a step runs: how many, how many bytes, over which axis of the mesh, for which kind of layer."""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from torchtitan_clone.parallel.context import context_attention, context_attention_backward

# Names of torch's operators, without the trailing underscore and the variants of one collective.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
_IMPLICIT = "redistribute_local_args"


@dataclass(frozen=True, kw_only=True, order=True)
class Call:
    """One kind of collective; equal calls are counted together."""

    axis: str
    collective: str
    layer: str
    implicit: bool
    """DTensor inserted it because an operator met tensors in layouts it could not take."""


def collective_name(func: Any) -> str | None:
    """Which collective an operator of torch's dispatcher is; None where it is none."""
    namespace, _, name = func._schema.name.partition("::")
    return _COLLECTIVES.get(name.rstrip("_")) if namespace in ("c10d", "_c10d_functional") else None


class CollectiveTrace(TorchDispatchMode):
    """Counts the collectives that run inside it; `axes` names process groups by what they are called in torch."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self._modules = ModuleTracker()
        self.counts: Counter[Call] = Counter()
        self.bytes: Counter[Call] = Counter()
        self.exposed: Counter[Call] = Counter()
        self._under_way: dict[int, Call] = {}

    def __enter__(self) -> "CollectiveTrace":
        self._modules.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._modules.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        collective = collective_name(func)
        result = func(*args, **(kwargs or {}))
        if collective is not None:
            call = Call(
                axis=self._axis(args), collective=collective, layer=self._layer(), implicit=_called_from(_IMPLICIT)
            )
            self.counts[call] += 1
            self.bytes[call] += max(map(_bytes, (*args, result)), default=0)
            self.exposed[call] += _is_waited_for(func, args)
            if namespace == "_c10d_functional":
                self._under_way |= {_storage(x): call for x in tree_leaves(result) if isinstance(x, Tensor)}
        elif name == "wait_tensor" or (namespace == "aten" and name != "view"):
            self._look_at_work(name, args)
        return result

    def _look_at_work(self, name: str, args: Any) -> None:
        """What an operation needs has to have arrived; behind a costly one the rest is hidden."""
        needed = [_storage(x) for x in tree_leaves(args) if isinstance(x, Tensor)]
        self.exposed.update([self._under_way.pop(storage) for storage in needed if storage in self._under_way])
        if name in ("mm", "addmm", "bmm", "linear") or "attention" in name:
            self._under_way.clear()

    def rows(self) -> list[dict[str, Any]]:
        """One row a kind of call, as plain data.

        `bytes` is the larger side (the whole of a gather, not the shard). `exposed` counts calls that ended before any
        product or attention began, and so hide behind nothing; send and recv are taken to be hidden.
        """
        return [
            {**vars(call), "count": count, "bytes": self.bytes[call], "exposed": self.exposed[call]}
            for call, count in sorted(self.counts.items())
        ]

    def table(self) -> str:
        """The rows as text, then what was redistributed implicitly."""
        lines = [f"{'axis':14}{'collective':16}{'layer':34}{'count':>7}{'exposed':>9}{'MiB':>12}"]
        for row in self.rows():
            name = f"{row['axis']:14}{row['collective']:16}{row['layer']:34}"
            mark = "  implicit" if row["implicit"] else ""
            lines.append(f"{name}{row['count']:7,}{row['exposed']:9,}{row['bytes'] / 2**20:12,.2f}{mark}")
        return "\n".join(lines)

    def _axis(self, args: Any) -> str:
        for value in tree_leaves(args):
            if isinstance(value, torch.ScriptObject):
                value = dist.ProcessGroup.unbox(value).group_name
            if isinstance(value, str) and value in self._axes:
                return self._axes[value]
        return "?"

    def _layer(self) -> str:
        """The deepest module at work, with numbers of layers as *."""
        names = [name for name in self._modules.parents if name != "Global"]
        deepest = max(names, key=len, default="")
        deepest = deepest.partition(".")[2] if "." in deepest else "optimizer and loss"
        return re.sub(r"\.\d+(?=\.|$)", ".*", deepest).replace("._checkpoint_wrapped_module", "")


def let_look_inside(mode_class: type[TorchDispatchMode]) -> None:
    """Lets such a mode see the collectives of operations of our own, which are one step further down."""
    for operation in (context_attention, context_attention_backward):
        _look_inside(operation, mode_class)


def _look_inside(operation: Any, mode_class: type[TorchDispatchMode]) -> None:
    def run(mode: TorchDispatchMode, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with mode:
            return operation._init_fn(*args, **(kwargs or {}))

    operation.register_torch_dispatch(mode_class, run)


let_look_inside(CollectiveTrace)


def _bytes(argument: Any) -> int:
    """Size of a tensor, or of all in a list."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(argument) if isinstance(x, Tensor))


def _is_waited_for(func: Any, args: Any) -> bool:
    """Whether the stream that computes does nothing else until the collective is done."""
    names = [argument.name for argument in func._schema.arguments]
    if dict(zip(names, args, strict=False)).get("async_op", True):
        return False
    return not torch.cuda.is_initialized() or torch.cuda.current_stream() == torch.cuda.default_stream()


def _storage(x: Any) -> int:
    """Which memory a tensor has, also where it is wrapped: as a shard, or as one that is still under way."""
    while (inner := getattr(x, "_local_tensor", getattr(x, "elem", None))) is not None:
        x = inner
    return x.untyped_storage()._cdata


def _called_from(function: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
