"""Which slice of each global tensor every rank holds: a region of it, or all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.documents import MAX_INTEGER, Value
from torchtitan_clone.torch_compat import global_offset

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of the tensor, a view; a plain tensor is its own shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_with_partial_grad(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, for a computation of which every rank does a share.

    The gradient of a replicated tensor is then the sum over the ranks. A plain tensor is returned as it is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    grads = [Partial() if placement.is_replicate() else placement for placement in tensor.placements]
    return tensor.to_local(grad_placements=grads)


def share_of_sum(tensor: Tensor) -> Tensor:
    """Returns this rank's shard, divided by the number of ranks that have the same one and whose results are summed."""
    if not isinstance(tensor, DTensor):
        return tensor
    copies = [size for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
              if placement.is_replicate()]  # fmt: skip
    return local_with_partial_grad(tensor) / prod(copies)


def local_shard_and_offset(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns this rank's shard of the tensor, and the index in the global tensor at which it starts."""
    return local_shard(tensor), global_offset(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.ndim


# global tensor                  offset (1, 0), size (2, 4): a shard of one rank
#     0 . . . . . .              region [(2, 3), (1, 3)]: first and last (exclusive) index in the global tensor
#     1 a a a a . .              window (1:2, 1:3): the same elements, as slices of the shard
#     2 a # # a . .
#     3 . . . . . .

Region = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """What one rank holds: a region of `size` at `offset` of the global tensor. Equal shards hold equal values."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    global_shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def overlap(self, other: "TensorShard") -> Region | None:
        """Returns the region that both shards hold; None where there is none."""
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        region = [(max(a, b), min(a + a_size, b + b_size)) for a, a_size, b, b_size in ends]
        return region if all(first < last for first, last in region) else None

    def window(self, region: Region) -> tuple[slice, ...]:
        """Returns the slices that select the region from this shard."""
        return tuple(slice(a - start, b - start) for (a, b), start in zip(region, self.offset, strict=True))

    def to_json(self) -> list[object]:
        """Returns the shard as data that JSON can hold."""
        return [self.offset, self.size, self.global_shape, str(self.dtype), self.device_type]

    @staticmethod
    def from_json(value: Value) -> "TensorShard":
        """Returns the shard that to_json() describes. DocumentError if it is not inside its global tensor."""
        match value.value:  # without a Value for each number, of which a large run has millions
            case [list(offset), list(size), list(shape), str(dtype), str(device_type)] if (
                len(offset) == len(size) == len(shape)
                and all(type(number) is int and 0 <= number <= MAX_INTEGER for number in (*offset, *size, *shape))
                and (0 in size or all(a + b <= whole for a, b, whole in zip(offset, size, shape, strict=True)))
                and dtype in DTYPES
            ):
                places = {"offset": tuple(offset), "size": tuple(size), "global_shape": torch.Size(shape)}
            case _:
                value.refuse("must be offset, size and shape of a region of a tensor, its data type and device type")
        return TensorShard(**places, dtype=DTYPES[dtype], device_type=device_type)


def describe_shard(tensor: Tensor) -> TensorShard:
    """Returns what this rank holds of a tensor."""
    local, offset = local_shard_and_offset(tensor)
    size = tuple(local.shape)
    device_type = local.device.type
    return TensorShard(offset=offset, size=size, global_shape=tensor.shape, dtype=tensor.dtype, device_type=device_type)


ShardMap = Mapping[str, Mapping[int, TensorShard]]  # by the tensor's name and by rank


def gather_shard_map(tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> ShardMap:
    """Returns which rank holds which shard of the tensors of all ranks; a collective over `group`."""
    own = {name: describe_shard(tensor) for name, tensor in tensors.items()}
    shard_map: dict[str, dict[int, TensorShard]] = {}
    for rank, shards in enumerate(all_gather_json(shards_to_json(own), group=group)):
        for name, shard in shards_from_json(shards).items():
            shard_map.setdefault(name, {})[rank] = shard
    return shard_map


def shards_to_json(shards: Mapping[str, TensorShard]) -> dict[str, list[object]]:
    """Returns the shards of one rank by the tensor's name as data that JSON can hold."""
    return {name: shard.to_json() for name, shard in shards.items()}


def shards_from_json(value: Value) -> dict[str, TensorShard]:
    """Returns the shards that shards_to_json() describes. DocumentError if one is not valid."""
    return {name: TensorShard.from_json(shard) for name, shard in value.entries().items()}
