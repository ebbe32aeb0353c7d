"""Initializes weights as a pure function of (seed, parameter name, position in the parameter).

Each block of rows has its own generator, on the CPU: values are bit-identical for every mesh and device.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan_clone.interfaces import Constant
from torchtitan_clone.ops.dtensor_shards import local_shard_and_offset

BLOCK_ELEMENTS = 1 << 18
MOST_THREADS = 16
_SERIAL_ELEMENTS = 1 << 14
"""Elements of one operation: few enough that torch computes it in the thread that draws the block."""
Transform = Callable[[Tensor], Tensor]
"""Returns initial values from normal ones with standard deviation 1, of each its own."""
StdOf = Callable[[str], float | Constant | Transform | None]
"""The standard deviation by the parameter's name, or a transform; None: all elements are one."""


def init_weights(named_parameters: dict[str, nn.Parameter], *, seed: int, std_of: StdOf, cutoff: float = 3.0) -> None:
    """Fills the parameters in place with a normal distribution, clamped at `cutoff` standard deviations.

    Draws blocks in up to MOST_THREADS threads. Each thread holds one block in host memory unless it writes it in place.
    """
    jobs = []
    with ThreadPoolExecutor(min(torch.get_num_threads(), MOST_THREADS)) as threads:
        for name, parameter in named_parameters.items():
            std = std_of(name)
            local, offset = local_shard_and_offset(parameter)
            local, shape = local.detach(), parameter.shape
            if std is None or isinstance(std, Constant):
                local.fill_(1.0 if std is None else std.value)
            elif local.numel():
                rows = max(1, BLOCK_ELEMENTS // max(1, shape[1:].numel()))
                fill = partial(
                    _fill_block, local=local, offset=offset, shape=shape, rows=rows, name=name, seed=seed, std=std,
                    cutoff=cutoff,
                )  # fmt: skip
                blocks = range(offset[0] // rows, -(-(offset[0] + len(local)) // rows))
                jobs += [threads.submit(fill, block) for block in blocks]
    for job in jobs:
        job.result()


def _fill_block(
    block: int, *, local: Tensor, offset: tuple[int, ...], shape: torch.Size, rows: int, name: str, seed: int,
    std: float | Transform, cutoff: float,
) -> None:  # fmt: skip
    """Fills the part of a block of so many rows that `local` holds, which starts at `offset` of the parameter."""
    top = block * rows
    bottom = min(top + rows, shape[0])
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    first, last = max(top, offset[0]), min(bottom, offset[0] + len(local))
    target = local[first - offset[0] : last - offset[0]]
    size = (bottom - top, *shape[1:])
    in_place = target.shape == size and target.is_contiguous() and target.is_cpu and target.dtype == torch.float32
    values = torch.randn(size, generator=generator, out=target if in_place else torch.empty(size))
    scale = 1.0 if callable(std) else std
    for part in values.view(-1).split(_SERIAL_ELEMENTS):
        part.mul_(scale).clamp_(-cutoff * scale, cutoff * scale)
        if callable(std):
            part.copy_(std(part))
    if not in_place:
        columns = (slice(start, start + count) for start, count in zip(offset[1:], local.shape[1:], strict=True))
        source = values[(slice(first - top, last - top), *columns)]
        step = max(1, _SERIAL_ELEMENTS // source[0].numel()) if target.is_cpu else len(source)
        for part, value in zip(target.split(step), source.split(step), strict=True):
            part.copy_(value)
