"""What dispatch modes know of the operators that they see: which are collectives, over which axes, and for what.

A *mark* is a context around code whose operators a trace treats differently. That code enters its mark itself, so that
no trace depends on names of functions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.collectives import is_exchange
from torchtitan_clone.torch_compat import Operator, TorchDispatchMode, tree_leaves

# Names of torch's operators, without the trailing underscore and the variants of one collective.
_COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast", "send": "send", "recv": "recv",
}  # fmt: skip
Kwargs = dict[str, object] | None
COMMUNICATING_OPERATIONS: list[torch.library.CustomOpDef] = []
"""Custom operators with collectives inside; whoever defines one adds it."""


class Mark:
    """Context that is active while code inside it runs; to enter and leave it takes less than a microsecond."""

    def __init__(self) -> None:
        self._depth = 0

    @property
    def is_active(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


OVER_ALL_RANKS = Mark()
"""Sums over all ranks, whatever axis of the mesh has the same ranks."""
COPIES_OF_WEIGHTS = Mark()
"""Weights are copied into the data type of the computation."""


def operator_name(func: Operator) -> str:
    """Returns the name of an operator without namespace and overload."""
    return func.name().partition("::")[2].partition(".")[0]


def collective_name(func: Operator, args: tuple = ()) -> str | None:
    """Returns which collective an operator is; None if it is none. Only the arguments of messages tell."""
    if is_exchange(func):
        return args[-1]
    is_of_torch = func.namespace in ("c10d", "_c10d_functional")
    return _COLLECTIVES.get(operator_name(func).rstrip("_")) if is_of_torch else None


def axes_of(args: tuple, *, group_axes: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Returns the axes whose ranks are those of a collective's process group; none if it is not a group of the mesh."""
    names = [value for value in tree_leaves(args) if isinstance(value, str)]
    names += [group.group_name for group in process_groups(args)]
    return next((group_axes[name] for name in names if name in group_axes), ())


def process_groups(args: tuple) -> Iterator[dist.ProcessGroup]:
    """Yields the process groups among the arguments of an operator."""
    for value in tree_leaves(args):
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError):  # the operation of a reduction
                yield dist.ProcessGroup.unbox(value)


def look_inside_operations(mode_class: type[TorchDispatchMode]) -> None:
    """Lets modes of a class see the collectives inside the custom operators that are defined until now."""
    for operation in COMMUNICATING_OPERATIONS:
        torch_compat.look_inside(operation, mode_class=mode_class)
