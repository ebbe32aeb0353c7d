"""The batches of a run, written again from what docs/data.md says: order, rows, packing and context of targets.

Shapes: B rows of the batch, T tokens of a row (seq_len).
"""

import hashlib
import math
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor

from torchtitan_clone.data import Dataset
from torchtitan_clone.data.dataset import TokenDataset, open_rows
from torchtitan_clone.ops import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class PlainBatch:
    """A global batch; without document masking no documents."""

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None

    @property
    def num_targets(self) -> int:
        """Number of targets."""
        return int((self.targets_BT >= 0).sum())

    def to(self, device: torch.device) -> "PlainBatch":
        """Copies what a model reads to a device; documents stay on the CPU."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "documents_BT"}
        return PlainBatch(**moved, documents_BT=self.documents_BT)


class PlainData:
    """The global batches of local data, one after another."""

    def __init__(self, dataset: Dataset, *, seq_len: int, rows: int, seed: int, document_masking: bool) -> None:
        assert isinstance(dataset, TokenDataset)
        self._rows = rows
        self._seed = seed
        self._eos_id = dataset.store.meta.eos_id
        self._document_masking = document_masking
        self._seq_len = seq_len
        self._is_packed = dataset.store.packing != "concatenate"
        self._tokens = dataset.store.tokens("train")
        self._packed = open_rows(dataset.store, "train", seq_len=seq_len)
        self._sample = 0

    def __next__(self) -> PlainBatch:
        samples = range(self._sample, self._sample + self._rows)
        self._sample = samples.stop
        found = [_pack_row(self._read(i), eos_id=self._eos_id, is_masked=self._document_masking) for i in samples]
        tokens, targets, positions, documents = (torch.stack(columns) for columns in zip(*found, strict=True))
        kept = documents if self._document_masking else None
        return PlainBatch(tokens_BT=tokens, targets_BT=targets, positions_BT=positions, documents_BT=kept)

    def _read(self, sample: int) -> Tensor:
        """Returns the row [T + 1] of a sample: a window of the tokens, or a row of packed documents."""
        length = self._seq_len
        count = len(self._packed) if self._is_packed else (len(self._tokens) - 1) // length
        epoch, position = divmod(sample, count)
        index = permuted(position, size=count, seed=self._seed, epoch=epoch)
        if self._is_packed:
            return torch.from_numpy(self._packed.read(torch.tensor([index]).numpy())[0].astype("int64"))
        return torch.from_numpy(self._tokens[index * length : (index + 1) * length + 1].astype("int64"))


def permuted(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Returns the image of a position in a permutation of range(size), with numbers of any size instead of uint64."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        left, right = divmod(position, width)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + _mixed(right ^ key)) % height
            else:
                right = (right + _mixed(left ^ key)) % width
        position = left * width + right
        if position < size:
            return position


def _mixed(value: int) -> int:
    """Returns the finalizer of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def _pack_row(row: Tensor, *, eos_id: int, is_masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns tokens, targets, positions and documents [T] of a row [T + 1], document by document."""
    tokens, targets = row[:-1], row[1:].clone()
    ends = [index for index, token in enumerate(tokens.tolist()) if token == eos_id] if is_masked else []
    targets[ends] = IGNORE_INDEX
    bounds = [0, *(end + 1 for end in ends), len(tokens)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    positions = torch.cat([torch.arange(size) for size in sizes])
    documents = torch.cat([torch.full((size,), number, dtype=torch.int32) for number, size in enumerate(sizes)])
    return tokens, targets, positions, documents


def context_of(has_target_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Returns [B, T]: whether a token, or a later one of its document, has a target; by all pairs of tokens."""
    tokens = has_target_BT.shape[1]
    pairs_BTT = (
        torch.ones(tokens, tokens, dtype=torch.bool, device=has_target_BT.device).triu() & has_target_BT[:, None]
    )
    if documents_BT is not None:
        documents_BT = documents_BT.to(has_target_BT.device)
        pairs_BTT = pairs_BTT & (documents_BT[:, :, None] == documents_BT[:, None])
    return pairs_BTT.any(dim=2)
