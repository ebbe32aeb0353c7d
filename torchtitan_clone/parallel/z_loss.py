"""z-loss of the output: pulls the logarithm of the softmax's denominator (lse) of each token towards 0.

It is coefficient * mean(lse^2) over the target tokens, and keeps logits from growing, which the cross-entropy allows:
adding a number to all logits of a token does not change it. Source: arXiv 2204.02311, section 5.
"""

import torch
from torch import Tensor

from torchtitan_clone.ops.cross_entropy import Z_LOSS
from torchtitan_clone.parallel.logged_term import LoggedTerm


class ZLoss(LoggedTerm):
    """Sums lse^2 over the targets of this rank in one step; the loss (`ops/cross_entropy.py`) has its gradients."""

    def __init__(self, coefficient: float, *, device: torch.device):
        super().__init__(Z_LOSS, device=device)
        self.coefficient = coefficient

    def add(self, values: list[Tensor], *, targets_N: Tensor) -> None:
        """Adds the tokens of a micro-batch, whose lse is given in chunks [C, 1]."""
        super().add([lse.square() for lse in values], targets_N=targets_N)
