"""Collectives by messages on a CPU, those of FSDP in the background: FSDP2 waits for them where there are no streams.

All-gather and reduce-scatter are messages between all pairs of ranks. gloo's copy through memory of their own, and take
1.5 and 3 times as long. Each rank sends and receives as many bytes as in a ring.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_clone import torch_compat

_GATHER, _REDUCE = range(0x6A, 0x6C)
"""Tags of messages."""


def _allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], *, group: dist.ProcessGroup, tag: int) -> "Messages":
    """Sends sent[rank] to each other rank of the group, and receives received[rank] from it."""
    rank, ranks = group.rank(), group.size()
    works: list[dist.Work | None] = []
    for other in ((rank + step) % ranks for step in range(1, ranks)):
        works.append(dist.isend(sent[other], group=group, group_dst=other, tag=tag))
    for other in ((rank - step) % ranks for step in range(1, ranks)):
        works.append(dist.irecv(received[other], group=group, group_src=other, tag=tag))
    # Without a timeout, gloo waits for a message as long as the group allowed when it was created.
    timeout = torch_compat.group_timeout(group, device=sent[rank].device)
    return Messages([work for work in works if work is not None], timeout=timeout)


def collective_of_message(operator: str, args: tuple) -> str | None:
    """Returns the collective that torch's operator "send" or "recv" is part of; None if it is part of none."""
    names = {_GATHER: "all_gather", _REDUCE: "reduce_scatter"}
    return names.get(args[3]) if operator in ("send", "recv") else None


def is_last_message(operator: str, args: tuple, *, group: dist.ProcessGroup) -> bool:
    """Whether the operator starts the last message of a collective on this rank: it comes from the next rank."""
    return operator == "recv" and args[2] == (group.rank() + 1) % group.size()


class Messages(dist.Work):
    """Messages that are sent and received."""

    def __init__(self, works: Sequence[dist.Work], *, timeout: timedelta) -> None:
        super().__init__()
        self._works = works
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until all messages are complete; RuntimeError if a rank has ended or takes too long."""
        for work in self._works:
            if not work.is_completed():  # has not been waited for, which gloo allows once
                work.wait(timeout or self._timeout)
        return True


class GatherByMessages:
    """Gathers a tensor of each rank, as FSDP's weights."""

    allocate = staticmethod(_allocate)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Messages:
        """Starts to gather the input [n] of each rank to the output [ranks * n], of which FSDP makes it a part."""
        parts = output_tensor.chunk(group.size())
        if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
            parts[group.rank()].copy_(input_tensor)
        return _exchange([input_tensor] * group.size(), parts, group=group, tag=_GATHER)


class SumByMessages:
    """Sums the gradients of modules over ranks, in the order of ranks; `pending` completes the sums later."""

    allocate = staticmethod(_allocate)

    def __init__(self, modules: Sequence[nn.Module], *, pending: "PendingSums | None") -> None:
        self._modules = modules
        self._pending = pending

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        """Starts to sum the parts [n] of all ranks' inputs [ranks * n] that belong to this rank to the output [n]."""
        own = input_tensor.chunk(group.size())
        parts = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(own)]
        messages = _exchange(own, parts, group=group, tag=_REDUCE)

        def complete() -> None:
            messages.wait()
            torch.add(parts[0], parts[1], out=output_tensor)
            for part in parts[2:]:
                output_tensor.add_(part)

        if self._pending is None:
            complete()
        else:
            self._pending.add(complete, modules=self._modules)


def all_gather(output: Tensor, part: Tensor, *, group: dist.ProcessGroup) -> None:
    """Gathers the part [...] of each rank to the output [ranks, ...]."""
    if dist.get_backend(group) == "gloo":
        GatherByMessages()(output_tensor=output, input_tensor=part, group=group).wait()
    else:
        torch_compat.all_gather_single(output, part, group=group)


def reduce_scatter(output: Tensor, parts: Tensor, *, group: dist.ProcessGroup) -> None:
    """Sums the parts [ranks, ...] of all ranks that belong to this rank to the output [1, ...]."""
    if dist.get_backend(group) == "gloo":
        SumByMessages([], pending=None)(output_tensor=output, input_tensor=parts, group=group)
    else:
        torch_compat.reduce_scatter_single(output, parts, group=group)


class PendingSums:
    """Sums of gradients that a backward completes when it ends: of two modules at most, since they take memory."""

    def __init__(self) -> None:
        self._completions = deque[Callable[[], object]]()

    def add(self, complete: Callable[[], object], *, modules: Sequence[nn.Module]) -> None:
        """Takes what completes the sum of the modules' gradients; calls it if no backward will end or FSDP adds it."""
        if not torch_compat.runs_backward() or _have_gradients(modules):
            complete()
            return
        torch_compat.after_backward(self._complete)
        self._completions.append(complete)
        if len(self._completions) > 2:
            self._completions.popleft()()

    def _complete(self) -> None:
        while self._completions:
            self._completions.popleft()()


def _have_gradients(modules: Sequence[nn.Module]) -> bool:
    return any(parameter.grad is not None for module in modules for parameter in _own_parameters(module))


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that FSDP shards with this module, not those of modules inside that have a group."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
