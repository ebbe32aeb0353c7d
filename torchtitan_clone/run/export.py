"""Exports of the weights in the Hugging Face format, while a run trains."""

import logging

import torch
import torch.distributed as dist

from torchtitan_clone.checkpoint.folder import delete_leftovers, restore_replaced
from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.comm.json_collectives import broadcast_json
from torchtitan_clone.config.resolved import EXPORT_FOLDER
from torchtitan_clone.data.opening import ending_as_trained
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.plan import RunPlan, is_export_due, plan_of

logger = logging.getLogger("torchtitan_clone")


class Exporter:
    """Writes hf/step-N below the run's folder; training waits. A failed export is reported, and training continues."""

    def __init__(self, *, metrics: MetricsWriter) -> None:
        self._metrics = metrics
        self.failed_steps: set[int] = set()

    def export_missing(self, progress: Progress, *, engine: Engine, first: RunPlan) -> None:
        """Exports the step that a run resumes from, if a stop or a kill prevented it; a collective."""
        folder = first.folder / EXPORT_FOLDER
        if dist.get_rank() == 0:
            restore_replaced(folder)
            delete_leftovers(folder)
        is_due = 0 < progress.step < first.last_step and is_export_due(first.config, step=progress.step)
        if is_due and broadcast_json(not (folder / f"step-{progress.step}").exists()).flag():
            self.export(progress.step, engine=engine, plan=plan_of(progress, first=first))

    def export(self, step: int, *, engine: Engine, plan: RunPlan) -> None:
        """Exports the weights of a step, with the rotary positions of the plan; a collective."""
        from torchtitan_clone.hub.export import export_files, export_weights
        from torchtitan_clone.hub.formats import format_of

        dtype = getattr(torch, plan.config.checkpoint.export_dtype)
        report = export_weights(
            plan.folder / EXPORT_FOLDER / f"step-{step}",
            tensors=engine.model_tensors() | (engine.ema.averages() if engine.ema and plan.config.ema.export else {}),
            slices=format_of(plan.spec).map_state(plan.model_tensors, args=plan.model_args),
            dtype=dtype,
            files=lambda: export_files(
                spec=plan.spec,
                model_args=plan.model_args,
                tokenizer=ending_as_trained(plan.tokenizer, training=plan.config.training, data=plan.config.data),
                dtype=dtype,
            ),
        )
        if report.error is None:
            self._metrics.log_event(step, "weights exported", seconds=report.seconds, size_gib=report.gib)
            self._metrics.ledger.book("saving", report.seconds)
        else:
            logger.warning("step %d could not be exported: %s; training continues without it", step, report.error)
            self.failed_steps.add(step)
