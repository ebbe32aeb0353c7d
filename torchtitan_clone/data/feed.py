"""What the two kinds of data have in common: a feed of token rows for one rank's share of every global batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

Note = Any
"""How far a feed is after some rows; plain data."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of every global batch that one rank takes."""

    global_batch_size: int
    rows: range
    """Contiguous, within range(global_batch_size)."""
    seq_len: int


def share_of_rank(rank: int, *, num_ranks: int, global_batch_size: int, seq_len: int) -> Share:
    """Equal, contiguous shares, so that those of all ranks, one after another, are the global batch."""
    assert global_batch_size % num_ranks == 0, f"{global_batch_size} rows for {num_ranks} ranks"
    size = global_batch_size // num_ranks
    return Share(global_batch_size=global_batch_size, rows=range(rank * size, (rank + 1) * size), seq_len=seq_len)


class Feed(IterableDataset):
    """Token rows [b, seq_len + 1] of one global batch after another, each with a note.

    b is the number of the rank's rows, or of this worker's part of them when it runs in a worker process: all workers'
    rows one after another are the rank's.
    """

    def __init__(self, share: Share) -> None:
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
