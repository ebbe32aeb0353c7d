"""Rounding of fp32 to bfloat16 up or down at random, so that its expectation is the fp32 value.

The draws are a pure function of a key and the position in the global tensor, by integer operations that every device
computes alike: state that is rounded so has the same bits on any mesh. Legend: R rows, C columns of a chunk.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_clone.ops.dtensor_shards import local_shard, local_shard_and_offset

_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements of a chunk: as many as stay in a cache on a CPU, as are worth a launch on a GPU."""
_LOW = 0xFFFF


class Chunk(NamedTuple):
    """A part of a tensor's shard as a matrix, and what is drawn for its elements."""

    rows: slice
    columns: slice
    first: Tensor
    """Draws [R, C] from 0 to 65,535, int32."""
    second: Tensor
    """Others."""

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the view [R, C] of the chunk in this rank's shard of a tensor of the same layout."""
        return _as_matrix(local_shard(tensor))[self.rows, self.columns]


def chunks(tensor: Tensor, *, seed: int, step: int, name: str) -> Iterator[Chunk]:
    """Yields this rank's shard of a tensor in chunks; the draws depend on nothing but these arguments and positions."""
    local, offset = local_shard_and_offset(tensor)
    matrix, most = _as_matrix(local), _ELEMENTS.get(local.device.type, _ELEMENTS["cuda"])
    row_key, column_key = (
        int.from_bytes(blake2b(f"{seed}/{step}/{name}/{side}".encode(), digest_size=8).digest(), "little", signed=True)
        for side in ("row", "column")
    )
    starts, shape = ((0, *offset)[-max(2, tensor.ndim) :], (1, *tensor.shape)[-max(2, tensor.ndim) :])
    sizes = (1, *local.shape)[-max(2, tensor.ndim) :]
    rows = torch.zeros((), dtype=torch.int64, device=local.device)
    for start, size, whole in zip(starts[:-1], sizes[:-1], shape[:-1], strict=True):
        rows = (rows * whole)[..., None] + torch.arange(start, start + size, device=local.device)
    rows_R = _mixed(rows.reshape(-1) + row_key)
    columns_C = _mixed(torch.arange(starts[-1], starts[-1] + sizes[-1], device=local.device) + column_key)
    width = min(most, max(1, matrix.shape[1]))
    for top in range(0, matrix.shape[0], height := max(1, most // width)):
        for left in range(0, matrix.shape[1], width):
            part = slice(top, top + height), slice(left, left + width)
            yield Chunk(*part, *_draw(rows_R[part[0]], columns_C[part[1]]))


def round_into(target: Tensor, values: Tensor, draws: Tensor) -> None:
    """Writes finite fp32 values [R, C], which it changes, to a bfloat16 target, rounded by draws from 0 to 65,535."""
    # A value is a fraction of the way from one bfloat16 to the next, that of its low 16 bits.
    target.view(torch.int16).copy_((values.view(torch.int32).add_(draws)) >> 16)


def _as_matrix(local: Tensor) -> Tensor:
    return local.view(-1, local.shape[-1]) if local.ndim > 1 else local.view(1, -1)


def _draw(rows_R: Tensor, columns_C: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two draws [R, C] for each element by one round of a mixer. Source: https://nullprogram.com/blog/2018/07/31."""
    x = rows_R[:, None] + columns_C
    x = x.bitwise_xor_((x >> 16).bitwise_and_(_LOW)).mul_(0x7FEB352D)
    return (x >> 15).bitwise_xor_(x).bitwise_and_(_LOW), (x >> 16).bitwise_and_(_LOW)


def _mixed(x: Tensor) -> Tensor:
    """Returns 32 bits of each int64 that depend on all of its bits. Source: the finalizer of MurmurHash3."""
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD, 1):
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    return x.view(torch.int32)[::2]
