"""One tensor assembled from pieces of others: slices, stacks along a new dimension, transposes, interleaved halves.

Targets are a model's tensors, sources those of a file; a box of a target is, for example, a rank's shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

Index = tuple[int | slice, ...]
"""An index per dimension: an int selects and drops it, a slice may have a positive step; those absent are complete."""


class Sliceable(Protocol):
    """A tensor in a file, of which contiguous regions can be read."""

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A source of this name and shape, of which `target[to] == source[of].transpose(*transpose)`.

    Without `of` it is all of the source, without `to` all of the target. A copy repeats values of another source: it is
    written, but need not be there to be read.
    """

    source: str
    shape: tuple[int, ...]
    of: Index = ()
    to: Index = ()
    transpose: tuple[int, int] | None = None
    is_copy: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.of and not self.to and self.transpose is None

    @property
    def numel(self) -> int:
        return prod(len(places) for places in _places(self.of, self.shape))

    def overlap(self, shape: Sequence[int], *, offset: Sequence[int], size: Sequence[int]) -> "Overlap | None":
        """Returns what the source shares with a box of the target of that shape; None where it shares nothing."""
        target = _places(self.to, shape)
        source = _places(self.of, self.shape)
        source_dims = _kept_dims(self.of, self.shape)
        if self.transpose is not None:
            a, b = self.transpose
            source_dims[a], source_dims[b] = source_dims[b], source_dims[a]
        pairs = list(zip(_kept_dims(self.to, shape), source_dims, strict=True))
        assert all(len(target[d]) == len(source[s]) for d, s in pairs), f"{self} does not fit into {list(shape)}"
        for dim, places in enumerate(target):
            first, last = _within(places, start=offset[dim], stop=offset[dim] + size[dim])
            if first >= last:
                return None
            target[dim] = range(places[first] - offset[dim], places[last - 1] - offset[dim] + 1, places.step)
            for _, source_dim in (pair for pair in pairs if pair[0] == dim):
                source[source_dim] = source[source_dim][first:last]
        target_index = _index(target, given=self.to)
        return Overlap(target=target_index, source=_index(source, given=self.of), transpose=self.transpose)


Pieces = Mapping[str, Sequence[Piece]]  # by the target's name


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
    complete = (*index, *[slice(None)] * (len(shape) - len(index)))
    pairs = zip(complete, shape, strict=True)
    return [range(i, i + 1) if isinstance(i, int) else range(*i.indices(size)) for i, size in pairs]


def _kept_dims(index: Index, shape: Sequence[int]) -> list[int]:
    return [dim for dim in range(len(shape)) if dim >= len(index) or not isinstance(index[dim], int)]


def _within(places: range, *, start: int, stop: int) -> tuple[int, int]:
    """First and last (exclusive) of the positions that are in [start, stop)."""
    first, last = (-(-(bound - places.start) // places.step) for bound in (start, stop))
    return max(0, first), min(len(places), last)


def _index(places: Sequence[range], *, given: Index) -> Index:
    dropped = [dim < len(given) and isinstance(given[dim], int) for dim in range(len(places))]
    return tuple(p.start if drop else slice(p.start, p.stop, p.step) for p, drop in zip(places, dropped, strict=True))


def sources_of(pieces: Pieces) -> dict[str, list[tuple[str, Piece]]]:
    """Returns for each source, in order of first use, the targets with their pieces that make it up."""
    found: dict[str, list[tuple[str, Piece]]] = {}
    for target, its_pieces in pieces.items():
        for piece in its_pieces:
            found.setdefault(piece.source, []).append((target, piece))
    for source, users in found.items():
        shape = users[0][1].shape
        assert all(piece.shape == shape for _, piece in users), f"{source} is declared with several shapes"
        covered = sum(piece.numel for _, piece in users)
        assert covered == prod(shape), f"{source} {list(shape)}: {covered} of its values are declared"
    return found


def assemble_source(
    users: Sequence[tuple[str, Piece]], *, read: Callable[[str], Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Returns a source in `dtype`, given what `sources_of` says of it and how a complete target is read by name."""
    name, piece = users[0]
    if piece.is_complete:
        return read(name).to(dtype)
    source = torch.empty(piece.shape, dtype=dtype)
    for name, piece in users:
        target = read(name)
        overlap = piece.overlap(target.shape, offset=(0,) * target.ndim, size=target.shape)
        if overlap is not None:
            overlap.in_source(source).copy_(overlap.in_box(target))
    return source
