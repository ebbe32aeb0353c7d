"""Moves tensors from one mesh to another in memory, without writing them to disk.

Ranks exchange which shards they have and which they want. Then, tensor by tensor, each rank cuts the regions that
others want out of its shard, and one all-to-all sends them. A plain tensor, such as a buffer, is a shard of the global
size on every rank that has it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.ops.dtensor_shards import Region, ShardMap, TensorShard, gather_shard_map, local_shard


def transfer(
    tensors: dict[str, Tensor], *, sources: ShardMap, wanted: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor that is `wanted` on this rank, in the layout it has there; a collective over all ranks.

    `tensors` are this rank's, `sources` is their gather_shard_map(). Tensors in `wanted` may be on the meta device.
    `tensors` is emptied, and its memory freed, one tensor after the other, so that at any time a rank needs memory for
    its old or its new tensors and a few more.
    """
    targets = gather_shard_map(wanted)
    for name in _alternating(sources):
        source = tensors.pop(name, None)
        target = _allocate(wanted[name], like=sources[name], device=device) if name in wanted else None
        if name in targets:
            _exchange(source, target, sources=sources[name], targets=targets[name])
        if source is not None:
            _free(source)
        if target is not None:
            yield name, target


def _alternating(shard_map: ShardMap) -> list[str]:
    """Returns the names in an order in which ranks take turns in sending, so that none receives before it can free."""
    turn: Counter[tuple[int, ...]] = Counter()
    order = []
    for name in sorted(shard_map):
        owners = tuple(sorted(shard_map[name]))
        order.append((turn[owners], name))
        turn[owners] += 1
    return [name for _, name in sorted(order)]


def _allocate(template: Tensor, *, like: Mapping[int, TensorShard], device: torch.device) -> Tensor:
    """Returns an empty tensor, on the CPU if the sources are there."""
    on_cpu = next(iter(like.values())).device_type == "cpu"
    return torch.empty_like(template, device="cpu" if on_cpu else device)


def _exchange(
    source: Tensor | None,
    target: Tensor | None,
    *,
    sources: Mapping[int, TensorShard],
    targets: Mapping[int, TensorShard],
) -> None:
    """Fills `target` on the ranks that have one, from the `source` of the ranks that have one."""
    rank = dist.get_rank()
    ranks = range(dist.get_world_size())
    sent = [_region_sent(rank, to, sources=sources, targets=targets) for to in ranks]
    received = [_region_sent(of, rank, sources=sources, targets=targets) for of in ranks]
    shard = next(iter(sources.values()))
    device = "cpu" if shard.device_type == "cpu" else torch.device(shard.device_type, torch.cuda.current_device())
    bytes_sent = [_num_bytes(region, shard.dtype) for region in sent]
    bytes_received = [_num_bytes(region, shard.dtype) for region in received]
    # As bytes: gloo knows few dtypes.
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    if source is not None:
        local = local_shard(source)
        regions = [local[sources[rank].window(region)] for region in sent if region is not None]
        pieces += [values.flatten().view(torch.uint8) for values in regions]
    incoming = torch.empty(sum(bytes_received), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, torch.cat(pieces), bytes_received, bytes_sent)
    if target is not None:
        local = local_shard(target)
        for region, piece in zip(received, incoming.split(bytes_received), strict=True):
            if region is not None:
                window = local[targets[rank].window(region)]
                window.copy_(piece.view(shard.dtype).view(window.shape))


def _region_sent(
    of: int, to: int, *, sources: Mapping[int, TensorShard], targets: Mapping[int, TensorShard]
) -> Region | None:
    """Returns the region that rank `of` sends to rank `to`. Ranks with equal shards share the receivers."""
    if of not in sources or to not in targets:
        return None
    region = sources[of].overlap(targets[to])
    if region is None:
        return None
    holders = [rank for rank, shard in sources.items() if shard == sources[of]]
    return region if of == (to if to in holders else holders[to % len(holders)]) else None


def _num_bytes(region: Region | None, dtype: torch.dtype) -> int:
    return 0 if region is None else dtype.itemsize * prod(last - first for first, last in region)


def _free(tensor: Tensor) -> None:
    """Frees the memory even while modules refer to the tensor."""
    storage = local_shard(tensor).untyped_storage()
    if storage.resizable():
        storage.resize_(0)
