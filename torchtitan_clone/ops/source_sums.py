"""Sums of the loss by group of tokens, as their source or text, next to the loss itself, which does not change.

Legend: N tokens, S sources, C columns, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchtitan_clone.ops import IGNORE_INDEX

COLUMNS = 3
"""Loss in nats, number and bytes of the target tokens."""


class SourceSums:
    """Adds up the losses, targets and bytes of targets of each source on this rank until `reset`."""

    def __init__(self, names: Sequence[str], *, bytes_V: Tensor, device: torch.device) -> None:
        self._names = list(names)
        self._bytes_V = bytes_V.to(device)
        self._sums_SC = torch.zeros(len(self._names), COLUMNS, dtype=torch.float64, device=device)
        """float64: in float32, sums over a pass of validation stop growing after 2^24 targets."""

    def reset(self) -> None:
        """Forgets what was added."""
        self._sums_SC.zero_()

    @property
    def size(self) -> int:
        """Number of the sums of all sources."""
        return len(self._names) * COLUMNS

    def add(self, losses: list[Tensor], *, targets_N: Tensor, groups_N: Tensor) -> None:
        """Adds the losses of chunks of the tokens, 0 where the target is IGNORE_INDEX, to the sources of that index."""
        losses_N = torch.cat(losses).flatten()
        is_target_N = targets_N != IGNORE_INDEX
        bytes_N = self._bytes_V[targets_N.clamp_min(0)] * is_target_N
        values_NC = torch.stack([losses_N.detach(), is_target_N.float(), bytes_N.float()], dim=1)
        self._sums_SC += torch.zeros_like(self._sums_SC, dtype=torch.float32).index_add_(0, groups_N, values_NC)

    def own(self, *, counts: bool) -> Tensor:
        """Returns the sums of this rank [S * C]; without `counts` only losses: another rank has the same tokens."""
        sums_SC = self._sums_SC.clone()
        if not counts:
            sums_SC[:, 1:] = 0
        return sums_SC.flatten()

    def by_source(self, sums: Sequence[float]) -> dict[str, tuple[float, float, float]]:
        """Returns loss, targets and bytes by source, given the sums of own() over all ranks."""
        rows = zip(sums[::COLUMNS], sums[1::COLUMNS], sums[2::COLUMNS], strict=True)
        return dict(zip(self._names, rows, strict=True))


def group_observer(
    sums: SourceSums | None, targets_N: Tensor, groups_BT: Tensor | None
) -> Callable[[list[Tensor]], None] | None:
    """Returns what adds losses to the sums of their groups; None without sums or groups."""
    if sums is None or groups_BT is None:
        return None
    return partial(sums.add, targets_N=targets_N, groups_N=groups_BT.flatten())
