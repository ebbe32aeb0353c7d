"""Tensors moved from one mesh to another in memory, without a disk between.

Ranks tell one another which parts they have and which they want. Then, tensor by tensor, each cuts out of its part what
the others want, and one all-to-all brings it there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.ops.dtensor_shards import Box, Part, Parts, gather_shard_map, local_shard


def move(
    tensors: dict[str, Tensor], *, sources: Parts, wanted: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor that is `wanted` here, in the layout it has there, where it may lie on meta; a collective.

    `tensors` are this rank's, `sources` those of all. They are emptied one by one, so that besides what a rank had or
    will have no more than a few tensors take memory at any time.
    """
    targets = gather_shard_map(wanted)
    for name in _alternating(sources):
        source = tensors.pop(name, None)
        target = _allocated(wanted[name], like=sources[name], device=device) if name in wanted else None
        if name in targets:
            _exchange(source, target, sources=sources[name], targets=targets[name])
        if source is not None:
            _free(source)
        if target is not None:
            yield name, target


def _alternating(parts: Parts) -> list[str]:
    """The names in an order in which ranks take turns in giving, so that none gets all before it gives anything."""
    turn: Counter[tuple[int, ...]] = Counter()
    order = []
    for name in sorted(parts):
        owners = tuple(sorted(parts[name]))
        order.append((turn[owners], name))
        turn[owners] += 1
    return [name for _, name in sorted(order)]


def _allocated(template: Tensor, *, like: Mapping[int, Part], device: torch.device) -> Tensor:
    """Memory for the tensor, on the kind of device on which it was."""
    on_cpu = next(iter(like.values())).device_type == "cpu"
    return torch.empty_like(template, device="cpu" if on_cpu else device)


def _exchange(
    source: Tensor | None, target: Tensor | None, *, sources: Mapping[int, Part], targets: Mapping[int, Part]
) -> None:
    """Fills `target` where there is one from the parts of the ranks that have a `source`."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    given = [_sent(rank, to, sources=sources, targets=targets) for to in ranks]
    taken = [_sent(of, rank, sources=sources, targets=targets) for of in ranks]
    part = next(iter(sources.values()))
    device = "cpu" if part.device_type == "cpu" else torch.device(part.device_type, torch.cuda.current_device())
    pieces = [torch.empty(0, dtype=part.dtype, device=device)]
    if source is not None:
        local = local_shard(source)
        pieces += [local[sources[rank].window(box)].flatten() for box in given if box is not None]
    incoming = torch.empty(sum(map(_numel, taken)), dtype=part.dtype, device=device)
    dist.all_to_all_single(incoming, torch.cat(pieces), list(map(_numel, taken)), list(map(_numel, given)))
    if target is not None:
        local = local_shard(target)
        for box, piece in zip(taken, incoming.split(list(map(_numel, taken))), strict=True):
            if box is not None:
                window = local[targets[rank].window(box)]
                window.copy_(piece.view(window.shape))


def _sent(of: int, to: int, *, sources: Mapping[int, Part], targets: Mapping[int, Part]) -> Box | None:
    """What the first rank sends to the second. Of ranks that hold the same, each serves some."""
    if of not in sources or to not in targets:
        return None
    box = sources[of].overlap(targets[to])
    if box is None:
        return None
    holders = [rank for rank, part in sources.items() if part == sources[of]]
    return box if of == (to if to in holders else holders[to % len(holders)]) else None


def _numel(box: Box | None) -> int:
    return 0 if box is None else prod(last - first for first, last in box)


def _free(tensor: Tensor) -> None:
    """Gives the memory back although modules may still refer to the tensor."""
    storage = local_shard(tensor).untyped_storage()
    if storage.resizable():
        storage.resize_(0)
