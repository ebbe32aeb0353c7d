"""Builds loaders with the options of the data tests, and compares their batches.

Shapes: B rows, T tokens of a row (SEQ_LEN).
"""

import numpy as np
import torch

from torchtitan_clone.data import Batch, Loader, LoaderOptions, ValidationLoader

SEQ_LEN = 16
GLOBAL_BATCH = 8
TENSORS = ("tokens_BT", "targets_BT", "positions_BT", "documents_BT")


def train_loader(
    dataset, *, rank: int = 0, num_ranks: int = 1, seq_len: int = SEQ_LEN, document_masking: bool = True, **changes
) -> Loader:
    """Builds a training loader; `changes` are arguments of Loader."""
    options = LoaderOptions(seq_len=seq_len, document_masking=document_masking, rank=rank, num_ranks=num_ranks)
    return Loader(dataset, options=options, **{"seed": 0, "global_batch_size": GLOBAL_BATCH, **changes})


def validation_loader(dataset, *, rank: int = 0, num_ranks: int = 1, seq_len: int = SEQ_LEN, document_masking=True):
    """Builds a validation loader."""
    options = LoaderOptions(seq_len=seq_len, document_masking=document_masking, rank=rank, num_ranks=num_ranks)
    return ValidationLoader(dataset, options=options, global_batch_size=GLOBAL_BATCH)


def next_batches(loader, count: int) -> list[Batch]:
    """Returns the next batches."""
    return [next(loader) for _ in range(count)]


def rows_of(batches: list[Batch]) -> np.ndarray:
    """Returns the tokens of all batches [B, T]."""
    return torch.cat([batch.tokens_BT for batch in batches]).numpy()


def assert_equal(left: list[Batch], right: list[Batch]) -> None:
    """Asserts that all tensors of all batches are equal; groups, if both have them."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for name in TENSORS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert one.num_targets == other.num_targets
        if one.groups_BT is not None and other.groups_BT is not None:
            assert torch.equal(one.groups_BT, other.groups_BT)


def concatenate(of_ranks: list[list[Batch]]) -> list[Batch]:
    """Returns the global batches, given the batches of all ranks."""
    joined = []
    for batches in zip(*of_ranks, strict=True):
        names = TENSORS if batches[0].groups_BT is None else [*TENSORS, "groups_BT"]
        tensors = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
        joined.append(Batch(**tensors, num_targets=sum(batch.num_targets for batch in batches)))
    return joined
