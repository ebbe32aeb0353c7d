"""One tensor assembled from slices of others: stacks along a new dimension, transposes, interleaved halves.

A target is a tensor of a model, a source is a tensor of a file. A box of the target is, for example, a rank's shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

# The slice `of` of a source fills the slice `to` of a target; # is what a rank with this box of the target reads.
#
#      source                                         target
#     +------------------------+                     +------------------------+
#     |  of                    |                     |        to              |
#     |  +------------+        |      transpose      |       +------------+   |
#     |  |      ######|        |     ----------->    |   box |            |   |
#     |  |      ######|        |                     |  +----+-----+      |   |
#     |  +------------+        |                     |  |    |#####|      |   |
#     +------------------------+                     |  |    +-----+------+   |
#                                                    |  +----------+          |
#                                                    +------------------------+
# `Overlap.source` counts the places of # from the corner of the source, `Overlap.target` from the corner of the box.

Index = tuple[int | slice, ...]
"""An index per dimension: an int selects and drops it, a slice may have a positive step; those absent are complete."""


class Sliceable(Protocol):
    """A tensor in a file, of which contiguous regions can be read."""

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """A slice of a source of this name and shape, with `target[to] == source[of].transpose(*transpose)`.

    Without `of` it is all of the source, without `to` all of the target. A copy repeats values of another source: it is
    written, but need not be there to be read. An optional one is read where it is there.
    """

    source: str
    shape: tuple[int, ...]
    of: Index = ()
    to: Index = ()
    transpose: tuple[int, int] | None = None
    is_copy: bool = False
    is_optional: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.of and not self.to and self.transpose is None

    @property
    def numel(self) -> int:
        return prod(len(places) for places in _places(self.of, self.shape))

    def overlap(self, shape: Sequence[int], *, offset: Sequence[int], size: Sequence[int]) -> "Overlap | None":
        """Returns what the slice shares with a box of the target of that shape; None where it shares nothing."""
        target = _places(self.to, shape)
        source = _places(self.of, self.shape)
        source_dims = _kept_dims(self.of, self.shape)
        if self.transpose is not None:
            a, b = self.transpose
            source_dims[a], source_dims[b] = source_dims[b], source_dims[a]
        source_dim_of = dict(zip(_kept_dims(self.to, shape), source_dims, strict=True))
        assert all(len(target[d]) == len(source[s]) for d, s in source_dim_of.items()), (
            f"{self} does not fit into {list(shape)}"
        )
        for dim, places in enumerate(target):
            # The first and last of the slice's places in this dimension that are in the box are the same in the source.
            first, last = _within(places, start=offset[dim], stop=offset[dim] + size[dim])
            if first >= last:
                return None
            target[dim] = range(places[first] - offset[dim], places[last - 1] - offset[dim] + 1, places.step)
            if dim in source_dim_of:
                source[source_dim_of[dim]] = source[source_dim_of[dim]][first:last]
        target_index = _index(target, given=self.to)
        return Overlap(target=target_index, source=_index(source, given=self.of), transpose=self.transpose)


TensorSlices = Mapping[str, Sequence[TensorSlice]]  # by the target's name


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The values that a box of a target and a source share; `target` indexes the box, `source` the complete source."""

    target: Index
    source: Index
    transpose: tuple[int, int] | None

    def in_box(self, box: Tensor) -> Tensor:
        return box[self.target]

    def in_source(self, source: Tensor) -> Tensor:
        """Returns a view of the values in the complete source, in the target's order of dimensions."""
        return self._ordered(source[self.source])

    def read(self, source: Sliceable) -> Tensor:
        """Reads the bounding box of the values from a file; returns them in the target's order of dimensions."""
        box = source[tuple(slice(i, i + 1) if isinstance(i, int) else slice(i.start, i.stop) for i in self.source)]
        # Not every file reader can skip values.
        return self._ordered(box[tuple(0 if isinstance(i, int) else slice(None, None, i.step) for i in self.source)])

    def _ordered(self, values: Tensor) -> Tensor:
        return values if self.transpose is None else values.transpose(*self.transpose)


def _places(index: Index, shape: Sequence[int]) -> list[range]:
    """Returns the positions that an index selects in each dimension, dropped ones included."""
    complete = (*index, *[slice(None)] * (len(shape) - len(index)))
    pairs = zip(complete, shape, strict=True)
    return [range(i, i + 1) if isinstance(i, int) else range(*i.indices(size)) for i, size in pairs]


def _kept_dims(index: Index, shape: Sequence[int]) -> list[int]:
    return [dim for dim in range(len(shape)) if dim >= len(index) or not isinstance(index[dim], int)]


def _within(places: range, *, start: int, stop: int) -> tuple[int, int]:
    """Returns the first and last (exclusive) item of `places` in [start, stop)."""
    first, last = (-(-(bound - places.start) // places.step) for bound in (start, stop))
    return max(0, first), min(len(places), last)


def _index(places: Sequence[range], *, given: Index) -> Index:
    """Returns the index that selects these positions and drops the dimensions that `given` drops."""
    dropped = [dim < len(given) and isinstance(given[dim], int) for dim in range(len(places))]
    return tuple(p.start if drop else slice(p.start, p.stop, p.step) for p, drop in zip(places, dropped, strict=True))


def sources_of(slices: TensorSlices) -> dict[str, list[tuple[str, TensorSlice]]]:
    """Returns for each source, in order of first use, the targets with their slices that make it up."""
    sources: dict[str, list[tuple[str, TensorSlice]]] = {}
    for target, its_slices in slices.items():
        for each in its_slices:
            sources.setdefault(each.source, []).append((target, each))
    for source, users in sources.items():
        shape = users[0][1].shape
        assert all(each.shape == shape for _, each in users), f"{source} is declared with several shapes"
        covered = sum(each.numel for _, each in users)
        assert covered == prod(shape), f"{source} {list(shape)}: {covered} of its values are declared"
    return sources


def assemble_source(
    users: Sequence[tuple[str, TensorSlice]], *, read: Callable[[str], Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Returns a source in `dtype`, given what `sources_of` says of it and how a complete target is read by name."""
    name, first = users[0]
    if first.is_complete:
        return read(name).to(dtype)
    source = torch.empty(first.shape, dtype=dtype)
    for name, each in users:
        target = read(name)
        overlap = each.overlap(target.shape, offset=(0,) * target.ndim, size=target.shape)
        if overlap is not None:
            overlap.in_source(source).copy_(overlap.in_box(target))
    return source
