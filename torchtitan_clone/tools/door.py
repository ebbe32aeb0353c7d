"""What the core finds here: `run.validation.Tools` and `data.opening.DocumentTools`."""

import time
from collections.abc import Callable, Sequence

from torchtitan_clone.config import Config
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.plan import RunPlan, phases
from torchtitan_clone.run.stopping import Timeouts
from torchtitan_clone.run.validation import Evaluator, is_due
from torchtitan_clone.tools.duplicates import drop_duplicates
from torchtitan_clone.tools.evaluation import evaluate
from torchtitan_clone.tools.evaluation_tasks import Task, build_tasks
from torchtitan_clone.tools.samples import encode_prompts, sample

__all__ = ["build_evaluators", "drop_duplicates"]


def build_evaluators(plan: RunPlan) -> list[Evaluator]:
    """Returns the evaluators that the options ask for; ConfigError with what cannot be evaluated."""
    config, tokenizer = plan.config, plan.tokenizer
    seq_len = min(phase.config.training.seq_len for phase in phases(config, plan.world_size))
    tasks = build_tasks(config, tokenizer=tokenizer, seq_len=seq_len)
    new_tokens, prompts = config.validation.sample_tokens, config.validation.prompts
    encoded = encode_prompts(prompts, tokenizer=tokenizer, seq_len=seq_len, new_tokens=new_tokens)
    found: list[Evaluator] = [SampleEvaluator(config, prompts=encoded)] if encoded else []
    return [*found, TaskEvaluator(config, tasks=tasks)] if config.evaluation.enable else found


class SampleEvaluator:
    """Logs continuations of prompts after each validation."""

    def __init__(self, config: Config, *, prompts: Sequence[Sequence[int]]) -> None:
        self._config = config
        self._prompts = prompts

    def is_due(self, step: int) -> bool:
        validation, last_step = self._config.validation, self._config.training.steps
        return validation.enable and is_due(step, freq=validation.freq, last_step=last_step)

    def run(
        self, step: int, *, engine: Engine, metrics: MetricsWriter, timeouts: Timeouts, stops: Callable[[], bool]
    ) -> bool:
        """Logs one sample for each prompt; returns False if `stops` ended it. A collective."""
        found = sample(engine, self._prompts, timeouts=timeouts, stops=stops)
        if found is None:
            return False
        decode = engine.plan.tokenizer.decode
        for prompt, ids in zip(self._prompts, found, strict=True):
            metrics.log_event(step, "sample", prompt=decode(prompt), text=decode(ids))
        return True


class TaskEvaluator:
    """Logs the metrics of evaluation tasks."""

    def __init__(self, config: Config, *, tasks: Sequence[Task]) -> None:
        self._config = config
        self._tasks = tasks

    def is_due(self, step: int) -> bool:
        evaluation, last_step = self._config.evaluation, self._config.training.steps
        return evaluation.enable and is_due(step, freq=evaluation.freq, last_step=last_step)

    def run(
        self, step: int, *, engine: Engine, metrics: MetricsWriter, timeouts: Timeouts, stops: Callable[[], bool]
    ) -> bool:
        """Logs the metrics of each task; returns False if `stops` ended it. A collective."""
        start = time.perf_counter()
        scores = evaluate(engine, self._tasks, timeouts=timeouts, stops=stops)
        if scores is None:
            return False
        for task, found in scores.items():
            metrics.log_event(step, "evaluation", **{f"evaluation/{task}/{name}": x for name, x in found.items()})
        metrics.log_event(step, "evaluated", seconds=time.perf_counter() - start)
        return True
