"""Expert parallelism: every rank holds some of the experts, and gets the rows of all ranks' tokens that chose them.

Source: arXiv 2006.16668. Legend: N rows of tokens, D model, E experts of all ranks, e of one rank, W ranks of the axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_clone.comm.collectives import others, start_exchange, uses_messages
from torchtitan_clone.ops.permutation import Permute, inverse
from torchtitan_clone.parallel.mesh import Method, local_tokens
from torchtitan_clone.torch_compat import is_fake, sum_over_group


@dataclass(frozen=True, kw_only=True)
class Route:
    """How rows came to this rank: counts by rank, and the order by expert that they were brought into."""

    sent: list[int]
    received: list[int]
    order: Tensor


class GroupExchange:
    """Sends rows to the ranks of their experts and back, over the group of the ep axis."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._size = group.size()

    @torch.compiler.disable
    def send(self, rows_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Returns the rows of this rank's experts from all ranks, sorted by expert and then by rank, and counts [e].

        The rows are sorted by expert, `counts_E` of each. Waits for the counts of all ranks: a host sync.
        """
        each = [len(counts_E) // self._size] * self._size
        theirs_We = _all_to_all(counts_E, sent=each, received=each, group=self._group)
        ours_We, theirs_We = (counts.view(self._size, -1) for counts in (counts_E, theirs_We))
        route = _even_route(rows_ND, ranks=self._size) if is_fake(rows_ND) else _route(ours_We, theirs_We)
        received = cast("Tensor", _AllToAll.apply(rows_ND, route.sent, route.received, self._group))
        return cast("Tensor", Permute.apply(received, route.order)), theirs_We.sum(0), route

    @torch.compiler.disable
    def send_back(self, rows_ND: Tensor, route: Route) -> Tensor:
        """Returns the results of the rows that were sent, in the order in which they were."""
        by_rank = cast("Tensor", Permute.apply(rows_ND, inverse(route.order)))
        return cast("Tensor", _AllToAll.apply(by_rank, route.received, route.sent, self._group))


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold experts."""
    return [module for module in model.modules() if hasattr(module, "exchange")]


def apply_expert_parallel(experts: Sequence[nn.Module], *, mesh: DeviceMesh) -> None:
    """Shards the experts over a one-dimensional mesh, in place; their number must be a multiple of its size."""
    for module in experts:
        cast("Any", module).exchange = GroupExchange(mesh.get_group())
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))


class DividedRows:
    """Rows whose tokens are divided over the cp axis, and what each of its ranks has over the tp axis."""

    def __init__(self, *, cp: DeviceMesh, tp: DeviceMesh, method: Method):
        self._groups = [mesh.get_group() for mesh in (cp, tp) if mesh.size() > 1]
        self._tp = (tp.get_local_rank(), tp.size())
        self._local_tokens = partial(local_tokens, rank=cp.get_local_rank(), degree=cp.size(), method=method)
        self._degree = cp.size() * tp.size()

    def indices(self, count: int) -> Tensor:
        """Returns the indices in their row of this rank's `count` tokens."""
        pieces = self._local_tokens(count * self._degree)
        rank, size = self._tp
        return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]).chunk(size)[rank]

    def sum(self, counts: Tensor) -> Tensor:
        """Returns the sum over the ranks that hold tokens of the same rows."""
        for group in self._groups:
            counts = sum_over_group(counts, group=group)
        return counts


def divide_rows(model: nn.Module, *, cp: DeviceMesh, tp: DeviceMesh, method: Method) -> None:
    """Tells the routers of a model which tokens of each row this rank has."""
    for module in model.modules():
        if hasattr(module, "rows"):
            cast("Any", module).rows = DividedRows(cp=cp, tp=tp, method=method)


def _route(ours_We: Tensor, theirs_We: Tensor) -> Route:
    sent, received = torch.stack([ours_We.sum(1), theirs_We.sum(1)]).tolist()  # the host sync
    return Route(sent=sent, received=received, order=_by_expert(theirs_We, rows=sum(received)))


def _even_route(rows_ND: Tensor, *, ranks: int) -> Route:
    """Returns the route if all ranks get equally many rows, for a simulated run, whose counts have no values."""
    more = len(rows_ND) % ranks
    sizes = [len(rows_ND) // ranks + (rank < more) for rank in range(ranks)]
    return Route(sent=sizes, received=sizes, order=torch.arange(len(rows_ND), device=rows_ND.device))


def _by_expert(counts_We: Tensor, *, rows: int) -> Tensor:
    """Returns the order by expert and then by rank of `rows` rows that are sorted by rank and then by expert."""
    ranks, experts = counts_We.shape
    segments = torch.arange(ranks * experts, device=counts_We.device)
    keys = segments % experts * ranks + segments // experts
    # Without the size it would wait for the device.
    return keys.repeat_interleave(counts_We.flatten(), output_size=rows).argsort(stable=True)


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
    if uses_messages(rows):
        rank = group.rank()
        parts, arriving = rows.contiguous().split(sent), out.split(received)
        arriving[rank].copy_(parts[rank])
        to, source = others(parts, group=group), others(arriving, group=group)
        # Traces do not know whether torch's all-to-all of a GPU is waited for: both must log the same.
        start_exchange(to, source, group=group, collective="all_to_all", own=[parts[rank]]).wait()
        return out
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
