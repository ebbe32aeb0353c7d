"""What is measured between two steps: the loss on the held-out documents, and what evaluators do."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from torchtitan_clone import doors
from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.data import ValidationLoader
from torchtitan_clone.observe.by_source import Totals, source_columns
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.parallel.gradients import sum_over_ranks
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.stopping import Timeouts

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


class Evaluator(Protocol):
    """What measures the model between two steps, besides the validation loss."""

    def is_due(self, step: int) -> bool:
        """Returns whether the options ask for it after this step."""
        ...

    def run(
        self, step: int, *, engine: Engine, metrics: MetricsWriter, timeouts: Timeouts, stops: Callable[[], bool]
    ) -> bool:
        """Logs what it measures; returns False if `stops`, asked after each batch, ended it. A collective."""
        ...


class Tools(Protocol):
    """What a package offers that evaluates: `torchtitan_clone/tools/door.py`."""

    def build_evaluators(self, plan: RunPlan) -> list[Evaluator]:
        """Returns the evaluators that the options ask for; ConfigError with what cannot be evaluated."""
        ...


def build_evaluators(plan: RunPlan) -> list[Evaluator]:
    """Returns the evaluators of a run; ConfigError if one is asked for and the door `tools` is closed."""
    config = plan.config
    if (tools := cast("Tools | None", doors.find("tools"))) is not None:
        return tools.build_evaluators(plan)
    if asked := "evaluation.enable" if config.evaluation.enable else config.validation.prompts and "validation.prompts":
        raise ConfigError(f"{asked}: {doors.why_closed('tools')}, or unset the option")
    return []


def is_due(step: int, *, freq: int, last_step: int) -> bool:
    """Returns whether something is done after this step: at the interval, and after the last step."""
    return step % freq == 0 or step == last_step


@contextmanager
def _averages_in_place(engine: Engine) -> Iterator[None]:
    """Lets the model compute with the averages of its weights, of which it has gathered none when this ends."""
    assert engine.ema is not None
    engine.free_unsharded_params()
    with engine.ema.in_place_of_weights():
        yield
        engine.free_unsharded_params()


class Validator:
    """Measures the model between two steps: the validation loss, and what evaluators do."""

    def __init__(self, config: Config, *, loader: ValidationLoader | None, evaluators: Sequence[Evaluator]) -> None:
        self._config = config
        self._evaluators = evaluators
        self.loader = loader

    def is_due(self, step: int) -> bool:
        """Whether the options ask for a validation or an evaluation after this step."""
        return self._is_validation_due(step) or any(evaluator.is_due(step) for evaluator in self._evaluators)

    def _is_validation_due(self, step: int) -> bool:
        validation, last_step = self._config.validation, self._config.training.steps
        return validation.enable and is_due(step, freq=validation.freq, last_step=last_step)

    def run(
        self, step: int, *, engine: Engine, metrics: MetricsWriter, timeouts: Timeouts, stops: Callable[[], bool]
    ) -> bool:
        """Logs what is due after a step; returns False if `stops`, asked after each batch, ended it. A collective."""
        with _averages_in_place(engine) if self._config.ema.validate else nullcontext():
            is_done = self._run(step, engine=engine, metrics=metrics, timeouts=timeouts, stops=stops)
        metrics.restart_interval()
        return is_done

    def _run(
        self, step: int, *, engine: Engine, metrics: MetricsWriter, timeouts: Timeouts, stops: Callable[[], bool]
    ) -> bool:
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
        due = (evaluator for evaluator in self._evaluators if evaluator.is_due(step))
        return all(each.run(step, engine=engine, metrics=metrics, timeouts=timeouts, stops=stops) for each in due)

    def validate(self, engine: Engine, *, timeouts: Timeouts, stops: Callable[[], bool]) -> ValidationResult | None:
        """Returns the mean loss; None if `stops` interrupted it. A collective."""
        assert self.loader is not None
        sources = engine.source_sums
        if sources is not None:
            sources.reset()
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
        own = [] if sources is None else sources.own(counts=is_leader).tolist()
        total, targets, *sums = sum_over_ranks([loss_sum.item() * is_leader, num_targets * is_leader, *own])
        by_source = {} if sources is None else self.loader.scale_bytes(sources.by_source(sums))
        return ValidationResult(loss=total / max(1, targets), num_targets=int(targets), by_source=by_source)
