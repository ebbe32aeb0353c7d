"""Embeddings and output projections with more or fewer rows than in a folder: one for each token of a vocabulary."""

import hashlib

import torch
from torch import Tensor

from torchtitan_clone.ops.tensor_slices import Sliceable

SAMPLES = 16
"""Rows that a new one is a combination of."""
_BLOCK = 1024
"""Rows that are read at a time."""


class ResizedRows:
    """A matrix in a file, with further rows drawn with the mean and the covariance of those that it has.

    A new row is the mean plus a random combination of the differences of `SAMPLES` consecutive rows from it, with
    weights of variance 1 / SAMPLES. It depends on the file, the tensor's name and its own number only, and is computed
    element by element: its bits are the same in every mesh and with any number of threads.
    """

    def __init__(self, values: Sliceable, *, name: str, rows: int, columns: int) -> None:
        self._values = values
        self._name = name
        self._rows = rows
        self._all = slice(0, columns)
        self._mean: Tensor | None = None

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        rows, columns = region
        stop = min(rows.stop, self._rows)
        parts = [self._values[rows.start : stop, columns]] if rows.start < stop else []
        drawn = [self._draw(row)[columns] for row in range(max(rows.start, self._rows), rows.stop)]
        return torch.cat((*parts, torch.stack(drawn))) if drawn else parts[0]

    def _draw(self, row: int) -> Tensor:
        """Returns a new row [columns], fp32."""
        if self._mean is None:
            self._mean = self._mean_row()
        digest = hashlib.blake2b(f"{self._name}/{row}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        first = int(torch.randint(self._rows, (), generator=generator))
        weights = (torch.randn(SAMPLES, generator=generator, dtype=torch.float64) / SAMPLES**0.5).tolist()
        drawn = self._mean.clone()
        for index, weight in enumerate(weights):
            at = (first + index) % self._rows
            drawn += (self._values[at : at + 1, self._all][0].double() - self._mean) * weight
        return drawn.float()

    def _mean_row(self) -> Tensor:
        """Returns the mean [columns] in float64; halves are added, because the order of a sum depends on threads."""
        total = torch.zeros(self._all.stop, dtype=torch.float64)
        for first in range(0, self._rows, _BLOCK):
            block = self._values[first : min(first + _BLOCK, self._rows), self._all].double()
            while len(block) > 1:
                half = len(block) // 2
                block = torch.cat((block[:half] + block[half : 2 * half], block[2 * half :]))
            total += block[0]
        return total / self._rows
