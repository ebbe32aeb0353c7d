"""What the two kinds of data have in common: a feed of token rows for one rank's share of every global batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

Note = Any
"""How far a feed is after some rows; plain data, which JSON can hold. None where that follows from their number."""


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """The rows of every global batch that one rank takes."""

    global_batch_size: int
    rows: range
    """What is read: contiguous, within range(global_batch_size), at least one."""
    size: int
    """Rows of the rank's batch, as many on every rank; those that are not read only fill it up."""
    counted: int
    """Rows at the front that are trained on; fewer than are read where the rank has none."""
    seq_len: int


def slice_of_rank(
    rank: int,
    *,
    num_ranks: int,
    global_batch_size: int,
    seq_len: int,
    part: int = 0,
    parts: int = 1,
    multiple: int = 1,
) -> BatchSlice:
    """Contiguous shares of one of `parts` parts of the global batch, so that all of them in order are the batch.

    Shares are equal where the numbers divide, else they are filled up: to one size, a multiple of `multiple`.
    """
    start, stop = (index * global_batch_size // parts for index in (part, part + 1))
    first, last = (start + index * (stop - start) // num_ranks for index in (rank, rank + 1))
    largest = math.ceil(math.ceil(global_batch_size / parts) / num_ranks)
    return BatchSlice(
        global_batch_size=global_batch_size,
        rows=range(first, last) if first < last else range(1),
        size=math.ceil(largest / multiple) * multiple,
        counted=last - first,
        seq_len=seq_len,
    )


class RowReader(IterableDataset):
    """Token rows [b, seq_len + 1] of one global batch after another, each with a note.

    b is the number of the rank's rows, or of this worker's part of them when it runs in a worker process: all workers'
    rows one after another are the rank's.
    """

    def __init__(self, share: BatchSlice) -> None:
        self.share = share

    def read(self, rows: range) -> Iterator[tuple[np.ndarray, Note]]:
        """Yield these rows of each global batch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[np.ndarray, Note]]:
        rows = self.share.rows
        worker = get_worker_info()
        if worker is None:
            return self.read(rows)
        first, last = (index * len(rows) // worker.num_workers for index in (worker.id, worker.id + 1))
        return self.read(rows[first:last])
