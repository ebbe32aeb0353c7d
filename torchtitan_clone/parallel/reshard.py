"""Moves tensors from one mesh to another in memory, with one all-to-all per tensor."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.ops.dtensor_shards import Region, ShardMap, TensorShard, gather_shard_map, local_shard

_Shards = Mapping[int, TensorShard]  # of one tensor, by rank


def transfer(
    tensors: dict[str, Tensor], *, sources: ShardMap, wanted: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor that is `wanted` on this rank, in the layout it has there; a collective over all ranks.

    `tensors` are this rank's, `sources` is their gather_shard_map(). Tensors in `wanted` may be on the meta device.
    Removes and frees `tensors` one by one, so that a rank needs memory for its old or new tensors and a few more.
    """
    targets = gather_shard_map(wanted)
    for name in _alternating(sources):
        source = tensors.pop(name, None)
        on_cpu = next(iter(sources[name].values())).device_type == "cpu"
        target = torch.empty_like(wanted[name], device="cpu" if on_cpu else device) if name in wanted else None
        if name in targets:
            _exchange(source, target, sources=sources[name], targets=targets[name])
        # Frees the memory even while modules refer to the tensor.
        if source is not None and (storage := local_shard(source).untyped_storage()).resizable():
            storage.resize_(0)
        if target is not None:
            yield name, target


def _alternating(shard_map: ShardMap) -> list[str]:
    """Returns the names so that ranks take turns in sending: each can free memory before it receives more."""
    turns: Counter[tuple[int, ...]] = Counter()
    order = []
    for name in sorted(shard_map):
        owners = tuple(sorted(shard_map[name]))
        order.append((turns[owners], name))
        turns[owners] += 1
    return [name for _, name in sorted(order)]


def _exchange(source: Tensor | None, target: Tensor | None, *, sources: _Shards, targets: _Shards) -> None:
    """Fills `target` on the ranks that have one, from the `source` of the ranks that have one."""
    rank = dist.get_rank()
    ranks = range(dist.get_world_size())
    sent = [_region_sent(rank, to, sources=sources, targets=targets) for to in ranks]
    received = [_region_sent(of, rank, sources=sources, targets=targets) for of in ranks]
    shard = next(iter(sources.values()))
    device = "cpu" if shard.device_type == "cpu" else torch.device(shard.device_type, torch.cuda.current_device())
    bytes_sent = [_num_bytes(region, shard.dtype) for region in sent]
    bytes_received = [_num_bytes(region, shard.dtype) for region in received]
    # As bytes: gloo supports few dtypes.
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


def _region_sent(of: int, to: int, *, sources: _Shards, targets: _Shards) -> Region | None:
    """Returns the region that rank `of` sends to rank `to`. Ranks with equal shards share the receivers."""
    region = sources[of].overlap(targets[to]) if of in sources and to in targets else None
    if region is None:
        return None
    holders = [rank for rank, shard in sources.items() if shard == sources[of]]
    return region if of == (to if to in holders else holders[to % len(holders)]) else None


def _num_bytes(region: Region | None, dtype: torch.dtype) -> int:
    return 0 if region is None else dtype.itemsize * prod(last - first for first, last in region)
