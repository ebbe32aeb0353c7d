"""Expert parallelism: every rank holds some of the experts, and gets the rows of all ranks' tokens that chose them.

Source: arXiv 2006.16668. Legend: N rows of tokens, D model, E experts of all ranks, e of one rank, W ranks of the axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_clone import torch_compat
from torchtitan_clone.ops.permutation import Permute, inverse


class ExpertModule(Protocol):
    """Experts whose parameters are stacked along the first dimension; `exchange` moves rows to the rank of theirs."""

    exchange: "TokenExchange | None"


@dataclass(frozen=True, kw_only=True)
class Route:
    """How rows came to this rank: counts by rank, and the order by expert that they were brought into."""

    sent: list[int]
    received: list[int]
    order: Tensor


class TokenExchange:
    """Sends rows to the ranks of their experts and back, over the group of the ep axis."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._size = group.size()

    @torch.compiler.disable
    def send(self, rows_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Route | None]:
        """Returns the rows of this rank's experts from all ranks, sorted by expert and then by rank, and counts [e].

        The rows are sorted by expert, `counts_E` of each. Waits for the counts of all ranks: a host sync.
        """
        if rows_ND.is_meta:  # as if every expert got equally many
            return rows_ND, counts_E.view(self._size, -1).sum(0), None
        theirs_We = torch.empty_like(counts_E)
        dist.all_to_all_single(theirs_We, counts_E, group=self._group)
        theirs_We = theirs_We.view(self._size, -1)
        if torch_compat.is_fake(rows_ND):
            route = self._equal_route(rows_ND)
        else:
            route = Route(
                sent=counts_E.view(self._size, -1).sum(1).tolist(),
                received=theirs_We.sum(1).tolist(),
                order=_by_expert(theirs_We),
            )
        received = cast("Tensor", _AllToAll.apply(rows_ND, route.sent, route.received, self._group))
        return cast("Tensor", Permute.apply(received, route.order)), theirs_We.sum(0), route

    def _equal_route(self, rows_ND: Tensor) -> Route:
        """Returns the route of a simulated run, in which every rank sends equally many rows to each."""
        each, rest = divmod(len(rows_ND), self._size)
        counts = [each + (rank < rest) for rank in range(self._size)]
        return Route(sent=counts, received=counts, order=torch.arange(len(rows_ND), device=rows_ND.device))

    @torch.compiler.disable
    def send_back(self, rows_ND: Tensor, route: Route | None) -> Tensor:
        """Returns the results of the rows that were sent, in the order in which they were."""
        if route is None:
            return rows_ND
        by_rank = cast("Tensor", Permute.apply(rows_ND, inverse(route.order)))
        return cast("Tensor", _AllToAll.apply(by_rank, route.received, route.sent, self._group))


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold experts."""
    return [module for module in model.modules() if hasattr(module, "exchange")]


def apply_expert_parallel(experts: Sequence[nn.Module], *, mesh: DeviceMesh) -> None:
    """Shards the experts over a one-dimensional mesh, in place; their number must be a multiple of its size."""
    for module in experts:
        cast("ExpertModule", module).exchange = TokenExchange(mesh.get_group())
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))


def _by_expert(counts_We: Tensor) -> Tensor:
    """Returns the order by expert and then by rank of rows that are sorted by rank and then by expert."""
    ranks, experts = counts_We.shape
    segments = torch.arange(ranks * experts, device=counts_We.device)
    keys = segments % experts * ranks + segments // experts
    return keys.repeat_interleave(counts_We.flatten()).argsort(stable=True)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _all_to_all(rows, sent=sent, received=received, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        rows = _all_to_all(grads[0], sent=ctx.received, received=ctx.sent, group=ctx.group)
        return rows, None, None, None


def _all_to_all(rows: Tensor, *, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
