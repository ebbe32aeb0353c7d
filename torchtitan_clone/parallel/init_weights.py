"""Initializes weights as a pure function of (seed, parameter name, position in the parameter).

Each block of rows has its own generator, on the CPU: values are bit-identical for every mesh and device.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan_clone.ops.dtensor_shards import local_shard_and_offset

BLOCK_ELEMENTS = 1 << 18
StdOf = Callable[[str], float | None]  # the standard deviation by the parameter's name; None fills with ones


def init_weights(named_parameters: dict[str, nn.Parameter], *, seed: int, std_of: StdOf, cutoff: float = 3.0) -> None:
    """Fills the parameters in place with a normal distribution, clamped at `cutoff` standard deviations."""
    with torch.no_grad():
        for name, parameter in named_parameters.items():
            std = std_of(name)
            local, offset = local_shard_and_offset(parameter)
            if std is None:
                local.fill_(1.0)
            elif local.numel():
                _fill_normal(local, name=name, seed=seed, std=std, cutoff=cutoff, shape=parameter.shape, offset=offset)


def _fill_normal(
    local: Tensor, *, name: str, seed: int, std: float, cutoff: float, shape: torch.Size, offset: tuple[int, ...]
) -> None:
    rows_per_block = max(1, BLOCK_ELEMENTS // max(1, shape[1:].numel()))
    first = offset[0]
    last = first + local.shape[0]
    columns = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    for block in range(first // rows_per_block, -(-last // rows_per_block)):
        top = block * rows_per_block
        bottom = min(top + rows_per_block, shape[0])
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = (
            torch.randn(bottom - top, *shape[1:], generator=generator).mul_(std).clamp_(-cutoff * std, cutoff * std)
        )
        rows = slice(max(first, top), min(last, bottom))
        local[rows.start - first : rows.stop - first] = values[(slice(rows.start - top, rows.stop - top), *columns)]
