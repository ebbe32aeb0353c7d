"""Compares what ranks must hold alike, bit by bit: a rank that differs has faulty memory or computes wrongly.

    mesh [replicate, shard]    rank 0: rows 0-3   rank 1: rows 4-7      ranks 0 and 2 are *holders* of the same shard,
                               rank 2: rows 0-3   rank 3: rows 4-7      and so are ranks 1 and 3

Each rank sends one checksum for each set of holders that it belongs to, and where those differ, one for each tensor.
"""

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_clone.comm.json_collectives import all_gather_json
from torchtitan_clone.ops.dtensor_shards import local_shard

_PIECE = 2**20
"""Elements whose products are in memory at a time, of 8 bytes each."""
_MULTIPLIER = 6364136223846793005
"""Odd, so that products of it modulo 2^64 are as different as what it multiplies."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_NAMES = 5
Holders = tuple[int, ...]
"""Ranks that hold the same shard of a tensor."""


def find_differences(state: Mapping[str, Tensor], *, stage: Sequence[int]) -> list[str]:
    """Returns one sentence for each set of holders whose shards differ, equal on all ranks. A collective over all.

    `stage` are the ranks that hold all tensors of this rank, of which those that are no DTensors are equal.
    """
    by_holders: dict[Holders, dict[str, int]] = defaultdict(dict)
    for name in sorted(state):
        holders = _holders(state[name], stage=stage)
        if len(holders) > 1:
            by_holders[holders][name] = int(checksum(state[name]))
    own = {_key(holders): _combined(sums.values()) for holders, sums in by_holders.items()}
    different = _different(own)
    if not different:
        return []
    hosts = [each.text() for each in all_gather_json(socket.gethostname())]
    sums_of = {_key(holders): sums for holders, sums in by_holders.items()}
    names = {key: list(_different(sums_of.get(key, {}))) for key in different}  # one key after another, on all ranks
    return [_describe(found, hosts=hosts, names=names[key]) for key, found in different.items()]


def checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum [], int64, of the bits of this rank's shard, which every change of a single value changes."""
    words = local_shard(tensor).detach().reshape(-1)
    words = words.view(_WORDS[words.element_size()])
    multipliers = torch.arange(min(_PIECE, words.numel()), device=words.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_PIECE):
        total = total * _MULTIPLIER + (piece.long() * multipliers[: len(piece)]).sum()  # modulo 2^64
    return total


def _holders(tensor: Tensor, *, stage: Sequence[int]) -> Holders:
    if not isinstance(tensor, DTensor):
        return tuple(stage)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(tensor.device_mesh.mesh[index].flatten().tolist()))


def _key(holders: Holders) -> str:
    return ",".join(map(str, holders))


def _combined(sums: Iterable[int]) -> int:
    total = 0
    for each in sums:
        total = (total * _MULTIPLIER + each) % 2**64
    return total


def _different(own: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Returns the values by rank of each key for which ranks have unlike values; a collective."""
    by_key: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, each in enumerate(all_gather_json({key: str(value) for key, value in own.items()})):
        for key, value in each.entries().items():
            by_key[key][rank] = int(value.text())
    return {key: values for key, values in sorted(by_key.items()) if len(set(values.values())) > 1}


def _describe(found: Mapping[int, int], *, hosts: Sequence[str], names: Sequence[str]) -> str:
    """Returns which rank differs from most others or, where there is no majority, which ranks differ."""
    ((most, count), *_) = Counter(found.values()).most_common()
    is_majority = 2 * count > len(found)
    named = [rank for rank, value in found.items() if value != most or not is_majority]
    ranks = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in named)
    same = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    if is_majority:
        return f"{ranks} differs from {count} ranks that must hold the same {same}"
    return f"{ranks} differ, though they must hold the same {same}"
