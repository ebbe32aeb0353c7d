"""Loss on the held-out documents."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchtitan_clone.config.schema import Validation
from torchtitan_clone.data import ValidationLoader
from torchtitan_clone.observe.by_source import Totals, source_columns
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.stopping import StopPolicy
from torchtitan_clone.run.timeouts import Timeouts


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Mean loss per target token, in nats, the number of target tokens, and both by source."""

    loss: float
    num_targets: int
    by_source: Mapping[str, Totals]

    def source_columns(self) -> dict[str, float]:
        """Returns the results by source as columns of metrics."""
        return source_columns(self.by_source, prefix="validation_")


class Validator:
    """Runs forward_backward without gradients over the validation split."""

    def __init__(self, validation: Validation, *, loader: ValidationLoader | None, last_step: int) -> None:
        self._options = validation
        self._last_step = last_step
        self.loader = loader

    def is_due(self, step: int) -> bool:
        """Whether the options ask for a validation after this step."""
        return self._options.enable and (step % self._options.freq == 0 or step == self._last_step)

    def run(self, engine: Engine, *, timeouts: Timeouts, stop: StopPolicy) -> ValidationResult | None:
        """Returns the mean loss; None if a request to stop interrupted it. A collective."""
        assert self.loader is not None
        engine.source_sums.reset()
        loss_sum = torch.zeros((), device=engine.device)
        num_targets = 0
        with torch.no_grad():
            for count, batch in enumerate(self.loader, start=1):
                loss_sum += engine.forward_backward([batch.to(engine.device)], num_targets=1).loss
                num_targets += batch.num_targets
                timeouts.beat()
                if stop.agree():
                    return None
                if count == self._options.steps:
                    break
        is_leader = engine.mesh.is_loss_leader
        own = engine.source_sums.own(counts=is_leader)
        total, targets, *sums = sum_over_ranks([loss_sum.item() * is_leader, num_targets * is_leader, *own])
        return ValidationResult(
            loss=total / max(1, targets), num_targets=int(targets), by_source=engine.source_sums.by_source(sums)
        )
