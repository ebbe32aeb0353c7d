"""Whole matrices of sharded parameters: which rank owns each for a step, and the exchange there and back.

    rank 0      rank 1                  rank 0      rank 1                  rank 0      rank 1
    wq rows 0-1 wq rows 2-3  to_owners  wq rows 0-3                         wq rows 0-1 wq rows 2-3
    w1 rows 0-1 w1 rows 2-3  -------->              w1 rows 0-3  to_holders w1 rows 0-1 w1 rows 2-3
                                        (an owner computes with all of it)  -------->

A *matrix* is a parameter of two dimensions, one of a stack such as an expert, or a block of rows of either. Its *parts*
are what each rank holds of it, in any layout of DTensors: each value is sent once to the owner and once back to every
rank that holds it. Owners follow from names, shapes and layouts alone: ranks agree on them without a collective.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_clone.comm.collectives import start_exchange, uses_messages
from torchtitan_clone.ops.dtensor_shards import Region
from torchtitan_clone.torch_compat import shard_bounds

Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size of a shard in its global tensor
MOST_BUCKETS = 8
"""Exchanges of a step in each direction: more overlap better, and larger messages cost less."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix:
    """A matrix, the rank that owns it, and what each rank holds of it: a region of the parameter's global tensor."""

    parameter: int
    """Index of the parameter among those that were given."""
    region: Region
    parts: Mapping[int, Region]
    owner: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, cols = self.region[-2:]
        return rows[1] - rows[0], cols[1] - cols[0]


def assign_owners(
    parameters: Sequence[Tensor], *, block_rows: Sequence[int | None], cost: Callable[[int, int], float], rank: int
) -> list[list[Matrix]]:
    """Returns the matrices of all ranks that share parameters with this one, in buckets, with balanced costs of owners.

    Args:
        parameters: [rows, columns] or [stack, rows, columns], DTensors or plain; in the same order on all ranks.
        block_rows: of each parameter, the rows of a matrix of its own; None: all of them.
        cost: cost of a matrix by its rows and columns, in any unit.
        rank: this rank.
    """
    bounds = [_bounds_by_rank(parameter, rank=rank) for parameter in parameters]
    loads: dict[frozenset[int], dict[int, float]] = {}
    buckets = []
    for bucket in _buckets(parameters, block_rows=block_rows, ranks=max(map(len, bounds), default=1)):
        regions = [(index, region) for index in bucket for region in _regions(parameters[index], block_rows[index])]
        regions.sort(key=lambda matrix: -cost(*_sides(matrix[1])))  # stable: large ones first, then in their order
        matrices = []
        for index, region in regions:
            parts = {holder: part for holder, each in bounds[index].items() if (part := _overlap(region, each))}
            # Ranks of one mesh know the same loads; those of other meshes are none of their business.
            load = loads.setdefault(frozenset(bounds[index]), dict.fromkeys(sorted(bounds[index]), 0.0))
            complete = [holder for holder, part in parts.items() if part == region]
            owner = min(complete or parts, key=lambda holder, load=load: (load[holder], holder))
            load[owner] += cost(*_sides(region))
            matrices.append(Matrix(parameter=index, region=region, parts=parts, owner=owner))
        buckets.append(matrices)
    return buckets


def row_values(matrix: Matrix, values: Tensor, *, rank: int) -> Matrix:
    """Returns the column of one value for each row of a matrix, of all that hold `values` [..., rows, 1]."""
    region = [*matrix.region[:-1], (0, 1)]
    bounds = _bounds_by_rank(values, rank=rank)
    return replace(matrix, region=region, parts={each: region for each in bounds if _overlap(region, bounds[each])})


class MatrixExchange:
    """Sends parts of matrices to their owners and results back, over the group of all ranks that hold some."""

    def __init__(self, parameters: Mapping[int, Tensor], *, group: dist.ProcessGroup | None, rank: int):
        self._rank = rank
        self._group = group
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._offsets = {index: _bounds_by_rank(x, rank=rank)[rank][0] for index, x in parameters.items()}

    def routes(self, matrices: Sequence[Matrix]) -> "tuple[Routes, Routes]":
        """Returns this rank's routes to the owners of matrices, and back to their holders."""
        there = (Route(m, part, source, m.owner) for m in matrices for part, source in _sources(m))
        back = (Route(m, part, m.owner, holder) for m in matrices for holder, part in m.parts.items())
        return self._own(there), self._own(back)

    def _own(self, routes: Iterable["Route"]) -> "Routes":
        kept: list[Route] = []
        outgoing: dict[int, list[Route]] = defaultdict(list)
        incoming: dict[int, list[Route]] = defaultdict(list)
        for route in routes:
            if route.source == route.target == self._rank:
                kept.append(route)
            elif route.source == self._rank:
                outgoing[route.target].append(route)
            elif route.target == self._rank:
                incoming[route.source].append(route)
        return Routes(
            kept=kept,
            outgoing={each: outgoing[rank] for each, rank in enumerate(self._ranks) if rank in outgoing},
            incoming={each: incoming[rank] for each, rank in enumerate(self._ranks) if rank in incoming},
            sent=[sum(prod(route.shape) for route in outgoing.get(rank, ())) for rank in self._ranks],
            received=[sum(prod(route.shape) for route in incoming.get(rank, ())) for rank in self._ranks],
        )

    def window(self, shard: Tensor, matrix: Matrix, part: Region) -> Tensor:
        """Returns the view [rows, columns] of a part of a matrix in this rank's shard of its parameter."""
        offsets = self._offsets[matrix.parameter]
        window = shard[tuple(slice(a - start, b - start) for (a, b), start in zip(part, offsets, strict=True))]
        return window.view(window.shape[-2:])

    def to_owners(self, routes: "Routes", shards: Mapping[int, Tensor]) -> "Gathering":
        """Starts to send the parts of this rank, given its shards by the index of the parameter. A collective."""
        like = next(iter(shards.values()))
        return Gathering(self._start(routes, lambda r: self.window(shards[r.matrix.parameter], r.matrix, r.part), like))

    def to_holders(self, routes: "Routes", results: Mapping[Matrix, Tensor], *, like: Tensor) -> "Flight":
        """Starts to send the results [rows, columns] of this rank's matrices to all holders. A collective.

        `like` has their data type and device.
        """
        return self._start(routes, lambda r: _within(results[r.matrix], r.part, r.matrix.region), like)

    def _start(self, routes: "Routes", values: Callable[["Route"], Tensor], like: Tensor) -> "Flight":
        """Sends to each rank one message with all that it gets, in the order of the routes."""
        kept = [(route, values(route)) for route in routes.kept]
        if self._group is None:
            return Flight(kept=kept)
        parts = {each: [values(route).reshape(-1) for route in some] for each, some in routes.outgoing.items()}
        if uses_messages(like):
            sent = [(each, torch.cat(some)) for each, some in parts.items()]
            received = [(each, like.new_empty(routes.received[each])) for each in routes.incoming]
            is_used = bool(sent or received)
            work = start_exchange(sent, received, group=self._group, collective="all_to_all") if is_used else None
            messages = [message for _, message in received]
        else:
            sent = torch.cat([like.new_empty(0), *chain.from_iterable(parts.values())])
            buffer = like.new_empty(sum(routes.received))
            sizes = routes.received, routes.sent
            work = dist.all_to_all_single(buffer, sent, *sizes, group=self._group, async_op=True)
            messages = [message for message in buffer.split(routes.received) if message.numel()]
        arriving = [*zip(routes.incoming.values(), messages, strict=True)]
        return Flight(kept=kept, work=work, sent=sent, arriving=arriving)


@dataclass(frozen=True, eq=False)
class Route:
    """A part of a matrix, from one rank to another, which may be the same."""

    matrix: Matrix
    part: Region
    source: int
    target: int

    @property
    def shape(self) -> list[int]:
        return [b - a for a, b in self.part[-2:]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Routes:
    """The routes of some matrices that begin or end at this rank, in one direction; ranks are those of the group."""

    kept: Sequence[Route]
    outgoing: Mapping[int, Sequence[Route]]
    """By the rank that they end at, in its order."""
    incoming: Mapping[int, Sequence[Route]]
    """By the rank that they begin at, in its order."""
    sent: list[int]
    """Values that this rank sends to each."""
    received: list[int]
    """Values that this rank receives from each."""


class Flight:
    """Messages on their way; the sent ones stay in memory until then."""

    def __init__(
        self,
        *,
        kept: Sequence[tuple[Route, Tensor]],
        work: dist.Work | None = None,
        sent: object = None,
        arriving: Sequence[tuple[Sequence[Route], Tensor]] = (),
    ):
        self._kept = kept
        self._work = work
        self._sent = sent
        self._arriving = arriving

    def wait(self) -> list[tuple[Matrix, Region, Tensor]]:
        """Waits for all messages; returns the values [rows, columns] of each part that this rank was sent or keeps."""
        if self._work is not None:
            self._work.wait()
        parts = [(route.matrix, route.part, values) for route, values in self._kept]
        for routes, message in self._arriving:
            for route, values in zip(routes, message.split([prod(route.shape) for route in routes]), strict=True):
                parts.append((route.matrix, route.part, values.view(route.shape)))
        return parts


@dataclass(frozen=True)
class Gathering:
    """Parts on their way to this rank, the owner of their matrices."""

    flight: Flight

    def wait(self) -> list[tuple[Matrix, Tensor]]:
        """Returns the complete matrices [rows, columns] of this rank, of those that it holds itself a view."""
        complete: dict[Matrix, Tensor] = {}
        for matrix, part, values in self.flight.wait():
            if part == matrix.region:
                complete[matrix] = values
                continue
            if matrix not in complete:
                complete[matrix] = values.new_empty(matrix.shape)
            _within(complete[matrix], part, matrix.region).copy_(values)
        return [*complete.items()]


def _sources(matrix: Matrix) -> list[tuple[Region, int]]:
    """Returns each distinct part once, with the rank that sends it: the owner itself where it holds it."""
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank, part in matrix.parts.items():
        holders.setdefault(tuple(part), []).append(rank)
    # Replicas take turns: the owners of different matrices are different ranks.
    return [
        ([*part], matrix.owner if matrix.owner in ranks else ranks[matrix.owner % len(ranks)])
        for part, ranks in holders.items()
    ]


def _within(matrix: Tensor, part: Region, region: Region) -> Tensor:
    """Returns the view of a part in a complete matrix [rows, columns]."""
    (top, _), (left, _) = region[-2:]
    (a, b), (c, d) = part[-2:]
    return matrix[a - top : b - top, c - left : d - left]


def _sides(region: Region) -> tuple[int, int]:
    (a, b), (c, d) = region[-2:]
    return b - a, d - c


def _regions(parameter: Tensor, block_rows: int | None) -> list[Region]:
    """Returns the regions of the matrices of a parameter in its global tensor."""
    *stack, rows, cols = parameter.shape
    size = block_rows or rows
    blocks = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    indices = product(*(range(count) for count in stack))
    return [[*((i, i + 1) for i in index), block, (0, cols)] for index in indices for block in blocks]


def _overlap(region: Region, bounds: Bounds) -> Region | None:
    offset, size = bounds
    part = [(max(a, o), min(b, o + s)) for (a, b), o, s in zip(region, offset, size, strict=True)]
    return part if all(a < b for a, b in part) else None


def _bounds_by_rank(parameter: Tensor, *, rank: int) -> dict[int, Bounds]:
    """Returns which shard of a parameter each rank of its mesh holds; of a plain tensor this rank has all."""
    if not isinstance(parameter, DTensor):
        return {rank: ((0,) * parameter.ndim, tuple(parameter.shape))}
    mesh = parameter.device_mesh
    coordinates = product(*map(range, mesh.shape))
    return {
        int(holder): shard_bounds(parameter, coordinate)
        for holder, coordinate in zip(mesh.mesh.flatten().tolist(), coordinates, strict=True)
    }


def _buckets(parameters: Sequence[Tensor], *, block_rows: Sequence[int | None], ranks: int) -> list[list[int]]:
    """Returns the indices of parameters in buckets of about as many values, each with work for all ranks."""
    matrices = sum(len(_regions(parameter, rows)) for parameter, rows in zip(parameters, block_rows, strict=True))
    count = max(1, min(MOST_BUCKETS, matrices // (2 * ranks)))
    total = sum(parameter.numel() for parameter in parameters)
    buckets: list[list[int]] = [[] for _ in range(count)]
    seen = 0
    for index, parameter in enumerate(parameters):
        buckets[min(count - 1, seen * count // max(1, total))].append(index)
        seen += parameter.numel()
    return [bucket for bucket in buckets if bucket]


def group_for(parameters: Sequence[Tensor], *, stage: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the group whose ranks hold parts of the parameters: that of one axis, else `stage`; None: one rank."""
    meshes = {x.device_mesh for x in parameters if isinstance(x, DTensor) and prod(x.device_mesh.shape) > 1}
    if not meshes:
        return None
    axes = {mesh: [dim for dim, size in enumerate(mesh.shape) if size > 1] for mesh in meshes}
    if len(meshes) == 1:
        ((mesh, dims),) = axes.items()
        if len(dims) == 1:
            return mesh.get_group(dims[0])
    assert stage is not None, "parameters on meshes of several axes need the group of all their ranks"
    return stage
