"""FSDP's collectives on a CPU as messages that go on while a rank computes: FSDP2 waits for them without streams.

All-gather and reduce-scatter are messages between all pairs of ranks. gloo's copy through memory of their own, and take
1.5 and 3 times as long. Each rank sends and receives as many bytes as in a ring.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.collectives import Messages, others, start_all_to_all, start_exchange, sum_parts

_MAX_PENDING_SUMS = 2
"""Sums that a backward leaves incomplete at a time: they take memory."""


class GatherByMessages:
    """Gathers a tensor of each rank of a group, as FSDP's weights."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for an output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Messages:
        """Starts to gather the input [n] of each rank to the output [ranks * n], of which FSDP makes it a part."""
        parts = output_tensor.chunk(group.size())
        if parts[group.rank()].data_ptr() != input_tensor.data_ptr():
            parts[group.rank()].copy_(input_tensor)
        received = others(parts, group=group)
        sent = [(target, input_tensor) for target, _ in received]
        return start_exchange(sent, received, group=group, collective="all_gather", own=[input_tensor])


class SumByMessages:
    """Sums the gradients of modules over the ranks of a group, in their order; `pending` completes the sums later."""

    def __init__(self, modules: Sequence[nn.Module], *, pending: "PendingSums | None") -> None:
        self._modules = modules
        self._pending = pending

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for an input or an output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        """Starts to sum the parts [n] of all ranks' inputs [ranks * n] that belong to this rank to the output [n]."""
        own = input_tensor.chunk(group.size())
        parts, messages = start_all_to_all(own, group=group, collective="reduce_scatter")

        def complete() -> None:
            messages.wait()
            sum_parts(parts, out=output_tensor)

        if self._pending is None:
            complete()
        else:
            self._pending.add(complete, modules=self._modules)


class PendingSums:
    """Sums of gradients that a backward completes when it ends."""

    def __init__(self) -> None:
        self._completions = deque[Callable[[], object]]()

    def add(self, complete: Callable[[], object], *, modules: Sequence[nn.Module]) -> None:
        """Takes what completes the sum of the modules' gradients; calls it if no backward will end or FSDP adds it."""
        parameters = (parameter for module in modules for parameter in _own_parameters(module))
        if not torch_compat.runs_backward() or any(parameter.grad is not None for parameter in parameters):
            complete()
            return
        torch_compat.after_backward(self._complete)
        self._completions.append(complete)
        while len(self._completions) > _MAX_PENDING_SUMS:
            self._completions.popleft()()

    def _complete(self) -> None:
        while self._completions:
            self._completions.popleft()()


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that FSDP shards with this module, not those of modules inside that have a group."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)
