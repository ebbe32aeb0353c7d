"""Tensors assembled from slices, complete and by shards, against indexing by hand."""

from itertools import product

import pytest
import torch

from torchtitan_clone.ops.tensor_slices import TensorSlice, assemble_source, sources_of

E, F, D = 3, 4, 6
TARGET = torch.arange(E * F * D).reshape(E, F, D)
LAYOUTS = {
    "same": ([TensorSlice(source="a", shape=(E, F, D))], {"a": TARGET}),
    "stacked": (
        [TensorSlice(source=f"a{e}", shape=(F, D), to=(e,)) for e in range(E)],
        {f"a{e}": TARGET[e] for e in range(E)},
    ),
    "stacked, transposed": (
        [TensorSlice(source=f"a{e}", shape=(D, F), to=(e,), transpose=(0, 1)) for e in range(E)],
        {f"a{e}": TARGET[e].T for e in range(E)},
    ),
    "transposed": (
        [TensorSlice(source="a", shape=(E, D, F), transpose=(1, 2))],
        {"a": TARGET.transpose(1, 2)},
    ),
    "halves": (
        [TensorSlice(source=name, shape=(E, F, D // 2), to=(slice(None), slice(None), half))
         for name, half in (("a", slice(0, 3)), ("b", slice(3, 6)))],
        {"a": TARGET[..., :3], "b": TARGET[..., 3:]},
    ),
    "interleaved": (
        [TensorSlice(source=name, shape=(E, F // 2, D), to=(slice(None), half))
         for name, half in (("a", slice(0, None, 2)), ("b", slice(1, None, 2)))],
        {"a": TARGET[:, ::2], "b": TARGET[:, 1::2]},
    ),
    "a column of a stack": (
        [TensorSlice(source=f"a{d}", shape=(F, E), to=(slice(None), slice(None), d), transpose=(0, 1))
         for d in range(D)],
        {f"a{d}": TARGET[:, :, d].T for d in range(D)},
    ),
    "interleaved halves of one source": (
        [TensorSlice(source="a", shape=(E, F, D), of=(slice(None), slice(None), slice(i, None, 2)),
                     to=(slice(None), slice(None), slice(3 * i, 3 * i + 3))) for i in range(2)],
        {"a": TARGET.unflatten(2, (2, 3)).transpose(2, 3).flatten(2)},
    ),
    "an index of the source": (
        [TensorSlice(source="a", shape=(F, E, D), of=(slice(None), e), to=(e,)) for e in range(E)],
        {"a": TARGET.transpose(0, 1)},
    ),
}  # fmt: skip
CASES = pytest.mark.parametrize(("slices", "sources"), LAYOUTS.values(), ids=LAYOUTS)


class Reader:
    """A file's tensor that can be read by contiguous regions; counts the values."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.read = 0

    def __getitem__(self, region):
        assert all(each.step in (None, 1) for each in region)
        found = self._tensor[region]
        self.read += found.numel()
        return found


def boxes(shape):
    """Returns all boxes that start at an even index and are up to three long."""
    sides = [[(first, size) for first in range(0, n, 2) for size in (0, 1, 3) if first + size <= n] for n in shape]
    return product(*sides)


@CASES
def test_a_box_of_the_target_is_read_from_its_sources(slices, sources):
    for box in boxes(TARGET.shape):
        offset, size = zip(*box, strict=True)
        found = torch.full(size, -1)
        for part in slices:
            if (overlap := part.overlap(TARGET.shape, offset=offset, size=size)) is not None:
                overlap.in_box(found).copy_(overlap.read(Reader(sources[part.source])))
        region = tuple(slice(first, first + count) for first, count in box)
        assert torch.equal(found, TARGET[region]), (offset, size)


@CASES
def test_sources_are_assembled_from_the_target(slices, sources):
    users = sources_of({"ours": slices})
    assert list(users) == list(sources)
    for name, tensor in sources.items():
        found = assemble_source(users[name], read=lambda _name: TARGET, dtype=torch.int64)
        assert torch.equal(found, tensor)


@CASES
def test_sources_are_assembled_from_boxes_of_the_target(slices, sources):
    found = {name: torch.full(tensor.shape, -1) for name, tensor in sources.items()}
    for row, column in product(range(E), (0, 2)):
        box = TARGET[row : row + 1, :, column * 2 : column * 2 + 4] if column == 0 else TARGET[row : row + 1, :, 4:]
        for part in slices:
            overlap = part.overlap(TARGET.shape, offset=(row, 0, column * 2), size=box.shape)
            if overlap is not None:
                overlap.in_source(found[part.source]).copy_(overlap.in_box(box))
    assert all(torch.equal(found[name], tensor) for name, tensor in sources.items())


def test_two_targets_share_a_source():
    """Gate and up of every expert are one tensor, interleaved and in the opposite order of ours."""
    fused = torch.arange(E * D * 2 * F).reshape(E, D, 2 * F)
    shares = [(slice(None), slice(None), slice(i, None, 2)) for i in range(2)]
    slices = {
        name: [TensorSlice(source="gate_up", shape=fused.shape, of=share, transpose=(1, 2))]
        for name, share in zip(("gate", "up"), shares, strict=True)
    }
    targets = {"gate": fused[..., ::2].transpose(1, 2), "up": fused[..., 1::2].transpose(1, 2)}
    for name, target in targets.items():
        overlap = slices[name][0].overlap(target.shape, offset=(0, 1, 2), size=(E, 2, 3))
        assert overlap is not None
        assert torch.equal(overlap.read(Reader(fused)), target[:, 1:3, 2:5])
    users = sources_of(slices)["gate_up"]
    assert torch.equal(assemble_source(users, read=targets.__getitem__, dtype=torch.int64), fused)


def test_a_shard_reads_no_more_than_it_needs():
    reader = Reader(TARGET[1].T)
    overlap = TensorSlice(source="a", shape=(D, F), to=(1,), transpose=(0, 1)).overlap(
        TARGET.shape, offset=(1, 1, 2), size=(2, 2, 3)
    )
    assert overlap is not None
    assert torch.equal(overlap.read(reader), TARGET[1, 1:3, 2:5])
    assert reader.read == 2 * 3


def test_no_dimension_and_no_values():
    three = torch.tensor(3)
    found = assemble_source([("x", TensorSlice(source="a", shape=()))], read=lambda _name: three, dtype=torch.int64)
    assert torch.equal(found, three)
    part = TensorSlice(source="a", shape=(2,), of=(0,))
    overlap = part.overlap((), offset=(), size=())
    assert overlap is not None
    assert overlap.read(Reader(torch.tensor([5, 6]))).item() == 5
    assert TensorSlice(source="a", shape=(0, 3)).overlap((0, 3), offset=(0, 0), size=(0, 3)) is None


@pytest.mark.parametrize(
    "slices",
    [
        [TensorSlice(source="a", shape=(4,), of=(slice(0, 3),))],
        [TensorSlice(source="a", shape=(4,)), TensorSlice(source="a", shape=(4,))],
        [
            TensorSlice(source="a", shape=(4,), of=(slice(0, 2),)),
            TensorSlice(source="a", shape=(5,), of=(slice(2, 4),)),
        ],
    ],
    ids=["too few", "too many", "two shapes"],
)
def test_a_declaration_that_does_not_add_up_is_an_error(slices):
    with pytest.raises(AssertionError, match="a"):
        sources_of({"x": slices})
