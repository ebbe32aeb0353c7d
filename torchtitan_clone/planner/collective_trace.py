"""Counts the collectives of a step: how many, how many bytes, over which axis of the mesh, for which kind of layer."""

import json
import logging
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.collectives import is_exchange
from torchtitan_clone.comm.tracing import (
    OVER_ALL_RANKS,
    Kwargs,
    Mark,
    axes_of,
    collective_name,
    look_inside_operations,
    operator_name,
    process_groups,
)
from torchtitan_clone.planner.torch_compat import around_dtensor
from torchtitan_clone.torch_compat import Operator, TorchDispatchMode, tree_leaves

logger = logging.getLogger("torchtitan_clone")

IMPLICIT = Mark()
"""DTensor redistributes the arguments of an operator that does not support their layouts."""


@dataclass(frozen=True, kw_only=True, order=True)
class Call:
    """One kind of collective; `implicit`: DTensor inserted it, because an operator does not support its layouts."""

    axis: str
    collective: str
    layer: str
    implicit: bool


class LayerTracker:
    """Tells which module runs, in forward, backward and recomputation, by its name in the outermost module."""

    def __init__(self) -> None:
        self._known: WeakSet[nn.Module] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._running: list[str] = []
        self._starts: list[tuple[int, str]] = []
        """From which autograd node on, by its number, the nodes belong to which module."""

    def start(self) -> None:
        """Follows all modules whose forward runs from now on."""
        self._hooks = [register_module_forward_pre_hook(self._follow)]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def current(self) -> str:
        """Name of the deepest module that runs; empty outside of modules and in the outermost one."""
        number = torch_compat.running_autograd_node()
        if self._running or number is None:
            return self._running[-1] if self._running else ""
        index = bisect(self._starts, number, key=itemgetter(0)) - 1
        return self._starts[index][1] if index >= 0 else ""

    def _follow(self, outermost: nn.Module, _args: object) -> None:
        if self._running or outermost in self._known:
            return
        self._known.update(outermost.modules())
        for name, module in list(outermost.named_modules())[1:]:
            # Around the hooks of tensor parallelism, which communicate for the module.
            enter = module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            # After an error too: recomputation ends with one as soon as it has what backward reads.
            leave = module.register_forward_hook(self._leave, always_call=True)
            self._hooks += [enter, leave]

    def _enter(self, name: str, _module: nn.Module, _args: object) -> None:
        self._running.append(name)
        self._note_start()

    def _leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._running.pop()
        self._note_start()

    def _note_start(self) -> None:
        # Backward runs the nodes of the first forward, not those of the recomputation.
        if torch_compat.running_autograd_node() is None:
            name = self._running[-1] if self._running else ""
            self._starts.append((torch_compat.next_autograd_node(), name))


class CollectiveTrace(TorchDispatchMode):
    """Counts the collectives that run inside it; `group_axes` are Mesh.group_axes()."""

    def __init__(self, group_axes: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self._group_axes = group_axes
        self._layers = LayerTracker()
        self._opened = ExitStack()
        self._depth = 0
        self._annotations: list[str] = []
        self.counts: Counter[Call] = Counter()
        self.bytes: Counter[Call] = Counter()
        self.exposed: Counter[Call] = Counter()
        self._unknown: set[Call] = set()
        self._in_flight: dict[int, Call] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch compiles functions inside the mode; FlexAttention runs in no other way there."""
        return True

    def __enter__(self) -> "CollectiveTrace":
        # Entered again inside the operators for context parallelism, see look_inside_operations().
        if self._depth == 0:
            look_inside_operations(CollectiveTrace)
            self._layers.start()
            self._opened.enter_context(around_dtensor(redistribution=IMPLICIT))
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            self._opened.close()
            self._layers.stop()

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple = (), kwargs: Kwargs = None
    ) -> object:
        if DTensor in types:
            return NotImplemented  # DTensor runs first, and what it communicates for the operator comes here
        name = operator_name(func)
        result = func(*args, **(kwargs or {}))
        if collective := collective_name(func, args):
            if all(group.size() > 1 for group in process_groups(args)):  # FSDP sums over one replica on a CPU
                size = _size(func, args, result)
                call = self._count(func, args, collective=collective, size=size)
                if func.namespace == "_c10d_functional":
                    self._in_flight |= dict.fromkeys(_storages(result), call)
        elif func.namespace == "profiler":
            self._annotate(name, args)
        elif name == "wait_tensor" or (func.namespace == "aten" and name != "view"):
            self._count_exposed(name, args)
        return result

    def _count(self, func: Operator, args: tuple, *, collective: str, size: int) -> Call:
        implicit = IMPLICIT.is_active
        call = Call(axis=self._axis(args), collective=collective, layer=self._layer(), implicit=implicit)
        self.counts[call] += 1
        self.bytes[call] += size
        # A CPU communicates for FSDP in the background, a simulated run does not: both must log the same.
        is_of_fsdp = any(name.startswith("FSDP::") for name in self._annotations)
        is_unknown = is_of_fsdp and not torch.cuda.is_initialized()
        is_waited_for = None if is_unknown else _is_waited_for(func, args)
        self.exposed[call] += bool(is_waited_for)
        if is_waited_for is None:
            self._unknown.add(call)
        return call

    def _annotate(self, name: str, args: tuple) -> None:
        """Follows record_function(), with which FSDP names the modules whose weights it gathers."""
        if name == "_record_function_enter_new":
            self._annotations.append(args[0])
        elif name == "_record_function_exit" and self._annotations:
            self._annotations.pop()

    def _count_exposed(self, name: str, args: tuple) -> None:
        """Counts collectives whose result an operator reads; those in flight during a costly one are hidden."""
        self.exposed.update([self._in_flight.pop(each) for each in _storages(args) if each in self._in_flight])
        if name in ("mm", "addmm", "bmm", "linear") or "attention" in name:
            self._in_flight.clear()

    def rows(self) -> list[dict[str, object]]:
        """Returns one row for each kind of call.

        `bytes` is the size of the larger side. `exposed` counts calls that ended before a matrix product or attention
        began, so that nothing hides them; send and recv count as hidden. It is None where only CUDA would tell.
        """
        return [
            {**vars(call), "count": count, "bytes": self.bytes[call], "exposed": self._known_exposed(call)}
            for call, count in sorted(self.counts.items())
        ]

    def _known_exposed(self, call: Call) -> int | None:
        return None if call in self._unknown else self.exposed[call]

    def table(self) -> str:
        """Returns the rows as text; implicit redistributions are marked."""
        lines = [f"{'axis':14}{'collective':16}{'layer':34}{'count':>7}{'exposed':>9}{'MiB':>12}"]
        for call, count in sorted(self.counts.items()):
            mark = "  implicit" if call.implicit else ""
            exposed = self._known_exposed(call)
            numbers = f"{count:7,}{'-' if exposed is None else f'{exposed:,}':>9}{self.bytes[call] / 2**20:12,.2f}"
            lines.append(f"{call.axis:14}{call.collective:16}{call.layer:34}{numbers}{mark}")
        return "\n".join(lines)

    def _axis(self, args: tuple) -> str:
        """Returns the axis of a collective; axes that hold the same ranks may share a process group."""
        axes = axes_of(args, group_axes=self._group_axes)
        return self._pick_axis(axes) if axes else "?"

    def _pick_axis(self, axes: Sequence[str]) -> str:
        of_fsdp = [axis for axis in axes if axis in ("dp_replicate", "fsdp")]
        if of_fsdp and self._fsdp_modules() is not None:
            return of_fsdp[-1]
        return "world" if OVER_ALL_RANKS.is_active and "world" in axes else axes[-1]

    def _fsdp_modules(self) -> str | None:
        """Returns the names of the modules that FSDP communicates for; None if it is not FSDP that communicates."""
        match = re.match(r"FSDP::\w+(?: \((.*?)\))?", self._annotations[-1] if self._annotations else "")
        return (match[1] or "") if match else None

    def _layer(self) -> str:
        """Returns the name of the module that runs or that FSDP communicates for, with numbers of layers as *."""
        modules = self._fsdp_modules()
        name = self._layers.current if modules is None else modules
        for wrapper in torch_compat.WRAPPER_NAMES:
            name = name.replace(f".{wrapper}", "")
        names = re.sub(r"\.\d+(?=[.,]|$)", ".*", name).split(", ")
        return ", ".join(dict.fromkeys(names)) or "optimizer and loss"


@contextmanager
def trace_collectives(*, group_axes: Mapping[str, Sequence[str]], rank: int, folder: Path) -> Iterator[None]:
    """Logs the collectives that run inside it as a table, and writes their rows to collectives.rank<rank>.json."""
    # A compiled region runs no dispatch mode; it communicates the same when it runs eagerly.
    with torch.compiler.set_stance("force_eager"), CollectiveTrace(group_axes) as trace:
        yield
    for line in (f"collectives of one step of rank {rank}:", *trace.table().splitlines()):
        logger.info("%s", line)
    (folder / f"collectives.rank{rank}.json").write_text(json.dumps(trace.rows(), indent=1))


def _storages(argument: object) -> list[int]:
    return [torch_compat.storage_id(x) for x in tree_leaves(argument) if isinstance(x, Tensor)]


def _num_bytes(argument: object) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(argument) if isinstance(x, Tensor))


def _size(func: Operator, args: tuple, result: object) -> int:
    """Returns the bytes of the larger side of a collective."""
    own = args[-3] if is_exchange(func) else 0
    return max(map(_num_bytes, (*args, result)), default=0) + own


def _is_waited_for(func: Operator, args: tuple) -> bool | None:
    """Whether the stream of the computation is idle until the collective is done; None without CUDA's streams."""
    if is_exchange(func):
        return False if args[-1] in ("send", "recv") else args[-2] or None
    if dict(zip(torch_compat.argument_names(func), args, strict=False)).get("async_op", True):
        return False
    return torch.cuda.current_stream() == torch.cuda.default_stream() if torch.cuda.is_initialized() else None
