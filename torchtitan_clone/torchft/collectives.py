"""Collectives between replica groups that report failure through torchft's manager instead of raising it."""

import json
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
import torchft
from torch import Tensor

from torchtitan_clone.replicas.protocol import StreamPositions

BUCKET_BYTES = 32 << 20


class ReplicaCollectives:
    """Collectives of one rank with the same rank of the other replica groups.

    After the first failure every further collective of the attempt returns at once, and the attempt is not committed.
    """

    def __init__(self, manager: torchft.Manager, *, device: torch.device):
        self._manager = manager
        self._device = device

    def error(self) -> Exception | None:
        """Returns the first failure since the quorum was formed."""
        error = self._manager.errored()
        return error and error.original_exception

    def sum(self, values: list[float]) -> list[float]:
        """Returns each number summed over the groups, or `values` if that fails."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._manager.allreduce(total, reduce_op=dist.ReduceOp.SUM).wait()
        return total.tolist() if self.error() is None else values

    def start_sum(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Starts to sum local tensors over the groups; call the result to wait and write the sums into the tensors."""
        pending: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]).to(self._device)
            pending.append((bucket, flat, self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM)))

        def finish() -> None:
            for bucket, flat, work in pending:
                work.wait()
                totals = flat.split([tensor.numel() for tensor in bucket])
                for tensor, total in zip(bucket, totals, strict=True):
                    tensor.copy_(total.view_as(tensor))

        return finish

    def gather(self, values: StreamPositions, *, replica_index: int, num_replicas: int) -> StreamPositions:
        """Returns the values of all groups, concatenated in their order, or `values` if that fails."""
        if not values or num_replicas == 1:
            return values
        text = bytearray(json.dumps(values).encode())
        lengths = [int(n) for n in self.sum([len(text) * (replica_index == index) for index in range(num_replicas)])]
        table = torch.zeros(num_replicas, max(lengths), dtype=torch.uint8)
        table[replica_index, : len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        table = table.to(self._device)
        self._manager.allreduce(table, reduce_op=dist.ReduceOp.SUM).wait()
        if self.error() is not None:
            return values
        texts = [bytes(row[:length]) for row, length in zip(table.tolist(), lengths, strict=True)]
        return [value for text in texts for value in json.loads(text)]


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups consecutive tensors of one dtype into buckets of about BUCKET_BYTES."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (sum(t.nbytes for t in bucket) >= BUCKET_BYTES or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
