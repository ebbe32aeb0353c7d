"""Collectives of small values as JSON, which the receiver checks.

torch's object collectives unpickle what they receive: whoever reaches a socket of the run could execute code with them.
"""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.documents import DocumentError, Value, parse_json

MAX_BYTES = 1 << 30  # of one rank's value
MAX_MESSAGE = 1 << 20  # characters


def all_gather_json(value: object, *, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Returns the values of all ranks in their order. DocumentError if one is not JSON."""
    own = _encode(value)
    sizes = _all_sizes(own, group=group)
    padded = _padded(own, size=max(sizes))
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [_decode(each, size=size, rank=rank) for rank, (each, size) in enumerate(zip(received, sizes, strict=True))]


def gather_json(value: object) -> list[Value]:
    """Returns the values of all ranks in their order on rank 0, nothing on the others. DocumentError as above."""
    own = _encode(value)
    sizes = _all_sizes(own, group=None)
    padded = _padded(own, size=max(sizes))
    received = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else []
    dist.gather(padded, received or None)
    return [_decode(each, size=size, rank=rank) for rank, (each, size) in enumerate(zip(received, sizes, strict=False))]


def broadcast_json(value: object) -> Value:
    """Returns rank 0's value on all ranks; `value` is ignored on the others. DocumentError if it is not JSON."""
    return scatter_json([value] * dist.get_world_size() if dist.get_rank() == 0 else [])


def scatter_json(values: Sequence[object]) -> Value:
    """Returns on each rank its item of rank 0's `values`, one per rank; ignored on the others. DocumentError as above.

    Costs rank 0 the memory of all values at the size of the largest.
    """
    encoded = [_encode(value) for value in values]
    sizes = torch.tensor([len(each) for each in encoded] or [0] * dist.get_world_size())
    dist.broadcast(sizes, src=0)
    rank, largest = dist.get_rank(), _checked(sizes.tolist())
    received = torch.empty(max(largest), dtype=torch.uint8)
    dist.scatter(received, [_padded(each, size=max(largest)) for each in encoded] or None)
    return _decode(received, size=largest[rank], rank=0)


def optional_text(value: Value) -> str | None:
    """Returns a message or None, as the ranks exchange about errors. DocumentError if it is neither."""
    return None if value.value is None else value.text(max_chars=MAX_MESSAGE)


def _encode(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _padded(content: Tensor, *, size: int) -> Tensor:
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: len(content)] = content
    return padded


def _all_sizes(own: Tensor, *, group: dist.ProcessGroup | None) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    return _checked([int(size) for size in sizes])


def _checked(sizes: list[int]) -> list[int]:
    if not all(0 < size <= MAX_BYTES for size in sizes):
        raise DocumentError(f"a rank sent a value of {max(sizes):,} bytes; from 1 to {MAX_BYTES:,} are accepted")
    return sizes


def _decode(content: Tensor, *, size: int, rank: int) -> Value:
    return parse_json(content[:size].numpy().tobytes(), where=f"value of rank {rank}")
