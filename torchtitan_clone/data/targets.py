"""What follows from the targets of rows: later targets for multi-token prediction, and which tokens are their context.

Shapes: B rows of the batch, T tokens of a row, K depths of multi-token prediction.
"""

import numpy as np

from torchtitan_clone.ops import IGNORE_INDEX


def later_targets(targets_BT: np.ndarray, *, depth: int) -> np.ndarray:
    """Returns the targets of each depth [B, K, T]: those of later positions of the same row and document."""
    by_depth = [targets_BT]
    for _ in range(depth):
        following_BT = np.full_like(targets_BT, IGNORE_INDEX)
        following_BT[:, :-1] = by_depth[-1][:, 1:]
        by_depth.append(np.where(targets_BT == IGNORE_INDEX, IGNORE_INDEX, following_BT))
    return np.stack(by_depth[1:], axis=1)


def mark_context(
    targets_BT: np.ndarray, *, documents_BT: np.ndarray | None, mtp_targets_BKT: np.ndarray | None
) -> np.ndarray:
    """Returns which tokens are context of a target of the next token, and of each depth [B, 1 + K, T]."""
    later = [] if mtp_targets_BKT is None else mtp_targets_BKT.swapaxes(0, 1)
    return np.stack([_is_context(each_BT, documents_BT) for each_BT in (targets_BT, *later)], axis=1)


def _is_context(targets_BT: np.ndarray, documents_BT: np.ndarray | None) -> np.ndarray:
    """Returns for each token [B, T] whether it, or a later token of its document, has a target."""
    last = targets_BT.shape[1] - 1
    index_BT = np.where(targets_BT == IGNORE_INDEX, last + 1, np.arange(last + 1))
    next_BT = np.minimum.accumulate(index_BT[:, ::-1], axis=1)[:, ::-1]  # of the positions that have a target
    if documents_BT is None:
        return next_BT <= last
    return (next_BT <= last) & (np.take_along_axis(documents_BT, next_BT.clip(max=last), axis=1) == documents_BT)
