"""Packs rows of token ids into the batches that a model consumes.

Shapes: B rows of the batch, T tokens of a row (seq_len), K depths of multi-token prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from torchtitan_clone.data.marks import ends_of, ids_of, marks_of, no_targets
from torchtitan_clone.data.targets import later_targets, mark_context
from torchtitan_clone.ops import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens and, for each token, its target, its position and its document.

    With context parallelism a rank holds only some tokens of each row, and the documents of all of them.
    """

    tokens_BT: Tensor  # int64
    targets_BT: Tensor
    """int64; the next token, or IGNORE_INDEX, which num_targets does not count."""
    positions_BT: Tensor
    """int64; counted from 0 at the start of each row and, with document masking, of each document in it."""
    documents_BT: Tensor | None
    """int32; 0, 1, 2, ... for the documents of a row, for the full row, on the CPU; None without document masking."""
    num_targets: int
    mtp_targets_BKT: Tensor | None = None
    """int64; of depth k the token k after the target, or IGNORE_INDEX; None without multi-token prediction."""
    is_context_BKT: Tensor | None = None
    """bool; whether each token is context of a target: it is in the target's document, at or before the position that
    predicts it. First for the next tokens, then for each depth of multi-token prediction; None without routers."""
    groups_BT: Tensor | None = None
    """int64; the index of each token's source in a mixture, or text in an evaluation, by which the loss is summed."""

    teacher_ids_BKT: Tensor | None = None
    """int32; of the K most likely next tokens after each token, where predictions of a teacher are stored."""
    teacher_values_BKT: Tensor | None = None
    """float32; their log-probabilities."""

    def with_predictions(self, ids_BKT: np.ndarray, values_BKT: np.ndarray) -> "Batch":
        """Returns the batch with the predictions for its first rows; the others have no targets."""
        tensors: list[Tensor] = []
        for content in (ids_BKT, values_BKT):
            all_BKT = np.zeros((len(self.tokens_BT), *content.shape[1:]), dtype=content.dtype)
            all_BKT[: len(content)] = content
            tensor = torch.from_numpy(all_BKT)
            tensors.append(tensor.pin_memory() if self.tokens_BT.is_pinned() else tensor)
        return replace(self, teacher_ids_BKT=tensors[0], teacher_values_BKT=tensors[1])

    def with_groups(self, groups_B: np.ndarray, /) -> "Batch":
        """Returns the batch with the group of its first rows; the others, which have no targets, are in group 0."""
        groups_BT = np.zeros(self.tokens_BT.shape, dtype=np.int64)
        groups_BT[: len(groups_B)] = groups_B[:, None]
        tensor = torch.from_numpy(groups_BT)
        return replace(self, groups_BT=tensor.pin_memory() if self.tokens_BT.is_pinned() else tensor)

    def select_context(self, tokens: slice) -> "Batch":
        """Returns the batch with is_context_BKT of these tokens only: with tensor parallelism a router gets some."""
        is_context_BKT = None if self.is_context_BKT is None else self.is_context_BKT[..., tokens]
        return replace(self, is_context_BKT=is_context_BKT)

    def microbatches(self, size: int) -> "list[Batch]":
        """Splits the batch into micro-batches of `size` rows; the last one may have fewer."""
        slices = [slice(start, start + size) for start in range(0, len(self.tokens_BT), size)]
        return [self._map(itemgetter(rows))._recount() for rows in slices]

    def select_tokens(self, index_T: Tensor) -> "Batch":
        """Returns the batch with only these tokens of every row, and the documents of all tokens."""
        selected = self._map(lambda tensor: tensor[..., index_T])
        return replace(selected, documents_BT=self.documents_BT)._recount()

    def to(self, device: torch.device) -> "Batch":
        """Copies the batch to a device, asynchronously if it is in pinned memory; documents stay on the CPU.

        There they say which parts of attention to compute.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, documents_BT=self.documents_BT)

    def pin_memory(self) -> "Batch":
        """Copies the batch to pinned memory, from which a GPU can copy asynchronously."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def _recount(self) -> "Batch":
        return replace(self, num_targets=int((self.targets_BT != IGNORE_INDEX).sum()))


def pack(
    rows: np.ndarray, *, eos_id: int, document_masking: bool, padding: int = 0, mtp_depth: int = 0,
    marks_context: bool = False,
) -> Batch:  # fmt: skip
    """Builds a batch from rows [B, T + 1] of token ids, in which eos_id or, in chats, a mark ends a document.

    The last `padding` rows have no targets, and tokens of chats are none unless marked. With document masking the end
    of a document has none, because the token after it belongs to another one.
    """
    ids, marks = ids_of(rows), marks_of(rows)
    tokens_BT = ids[:, :-1].astype(np.int64)
    targets_BT = ids[:, 1:].astype(np.int64)
    if marks is not None:
        np.putmask(targets_BT, no_targets(marks[:, 1:]), IGNORE_INDEX)  # a third of the time of an assignment
    positions_BT = np.tile(np.arange(tokens_BT.shape[1]), (len(rows), 1))
    documents_BT = None
    if document_masking:
        ends_BT = ends_of(rows[:, :-1], marks=None if marks is None else marks[:, :-1], eos_id=eos_id)
        targets_BT[ends_BT] = IGNORE_INDEX
        starts_BT = np.zeros_like(ends_BT)
        starts_BT[:, 1:] = ends_BT[:, :-1]
        documents_BT = np.cumsum(starts_BT, axis=1, dtype=np.int32)
        positions_BT -= np.maximum.accumulate(np.where(starts_BT, positions_BT, 0), axis=1)
    targets_BT[len(targets_BT) - padding :] = IGNORE_INDEX
    mtp_targets_BKT = later_targets(targets_BT, depth=mtp_depth) if mtp_depth else None
    given = {"documents_BT": documents_BT, "mtp_targets_BKT": mtp_targets_BKT}
    is_context_BKT = mark_context(targets_BT, **given) if marks_context else None
    return Batch(
        tokens_BT=torch.from_numpy(tokens_BT),
        targets_BT=torch.from_numpy(targets_BT),
        positions_BT=torch.from_numpy(positions_BT),
        documents_BT=None if documents_BT is None else torch.from_numpy(documents_BT),
        num_targets=int(np.count_nonzero(targets_BT != IGNORE_INDEX)),
        mtp_targets_BKT=None if mtp_targets_BKT is None else torch.from_numpy(mtp_targets_BKT),
        is_context_BKT=None if is_context_BKT is None else torch.from_numpy(is_context_BKT),
    )
