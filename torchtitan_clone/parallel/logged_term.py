"""A term of the objective whose gradients are computed with those of the loss; its value is logged beside the loss."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.parallel.forward_backward import ForwardBackward, Rows, StepOutput


class LoggedTerm:
    """Sums a value over the targets of this rank in one step."""

    def __init__(self, name: str, *, device: torch.device):
        self._name = name
        self._sum = torch.zeros((), device=device)

    def add(self, values: list[Tensor], *, targets_N: Tensor) -> None:
        """Adds the tokens of a micro-batch, whose values are given in chunks [C, 1]."""
        is_target_N = targets_N != IGNORE_INDEX
        self._sum += torch.where(is_target_N, torch.cat(values).flatten(), 0.0).sum()

    def logged(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Returns a forward_backward whose output has the term too, without its coefficient; not without gradients."""

        def run(microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput:
            self._sum.zero_()
            output = forward_backward(microbatches, num_targets=num_targets)
            if not torch.is_grad_enabled():
                return output
            return replace(output, auxiliary={**output.auxiliary, self._name: self._sum / num_targets})

        return run
