"""What is measured between two steps: the loss on the held-out documents, samples and evaluation tasks."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan_clone.config import Config
from torchtitan_clone.data import ValidationLoader
from torchtitan_clone.observe.by_source import Totals, source_columns
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.evaluation import evaluate
from torchtitan_clone.run.evaluation_tasks import Task
from torchtitan_clone.run.samples import sample
from torchtitan_clone.run.timeouts import Timeouts

logger = logging.getLogger("torchtitan_clone")


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
    """Measures the model between two steps: validation loss, continuations of prompts, and evaluation tasks."""

    def __init__(
        self,
        config: Config,
        *,
        loader: ValidationLoader | None,
        tasks: Sequence[Task],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._options = config.validation
        self._evaluation = config.evaluation
        self._last_step = config.training.steps
        self._tasks = tasks
        self._prompts = prompts
        self.loader = loader

    def is_due(self, step: int) -> bool:
        """Whether the options ask for a validation or an evaluation after this step."""
        return self._is_validation_due(step) or self._is_evaluation_due(step)

    def _is_validation_due(self, step: int) -> bool:
        return self._options.enable and (step % self._options.freq == 0 or step == self._last_step)

    def _is_evaluation_due(self, step: int) -> bool:
        return self._evaluation.enable and (step % self._evaluation.freq == 0 or step == self._last_step)

    def run(
        self, step: int, *, engine: Engine, metrics: MetricsWriter, timeouts: Timeouts, stops: Callable[[], bool]
    ) -> bool:
        """Logs what is due after a step; returns False if `stops`, asked after each batch, ended it. A collective."""
        start = time.perf_counter()
        if self._is_validation_due(step):
            result = self.validate(engine, timeouts=timeouts, stops=stops)
            if result is None:
                return False
            seconds = time.perf_counter() - start
            values = {"validation_targets": result.num_targets, "seconds": seconds, **result.source_columns()}
            if result.num_targets:
                metrics.log_validation(step, result.loss, **values)
            else:
                logger.warning("validation: held-out text fills no row of seq_len tokens; raise data.held_out_fraction")
            found = sample(engine, self._prompts, timeouts=timeouts, stops=stops) if self._prompts else []
            if found is None:
                return False
            decode = engine.plan.tokenizer.decode
            for prompt, ids in zip(self._prompts, found, strict=True):
                metrics.log_event(step, "sample", prompt=decode(prompt), text=decode(ids))
        if self._is_evaluation_due(step):
            start = time.perf_counter()
            scores = evaluate(engine, self._tasks, timeouts=timeouts, stops=stops)
            if scores is None:
                return False
            for task, found in scores.items():
                metrics.log_event(step, "evaluation", **{f"evaluation/{task}/{name}": x for name, x in found.items()})
            metrics.log_event(step, "evaluated", seconds=time.perf_counter() - start)
        return True

    def validate(self, engine: Engine, *, timeouts: Timeouts, stops: Callable[[], bool]) -> ValidationResult | None:
        """Returns the mean loss; None if `stops` interrupted it. A collective."""
        assert self.loader is not None
        engine.source_sums.reset()
        loss_sum = torch.zeros((), device=engine.device)
        num_targets = 0
        with torch.no_grad():
            for count, batch in enumerate(self.loader, start=1):
                loss_sum += engine.forward_backward([batch.to(engine.device)], num_targets=1).loss
                num_targets += batch.num_targets
                timeouts.beat()
                if stops():
                    return None
                if count == engine.plan.config.validation.steps:  # of this phase
                    break
        is_leader = engine.mesh.is_loss_leader
        own = engine.source_sums.own(counts=is_leader).tolist()
        total, targets, *sums = sum_over_ranks([loss_sum.item() * is_leader, num_targets * is_leader, *own])
        by_source = self.loader.scale_bytes(engine.source_sums.by_source(sums))
        return ValidationResult(loss=total / max(1, targets), num_targets=int(targets), by_source=by_source)
