"""Exports of the weights in the Hugging Face format, while a run trains."""

import logging

import torch

from torchtitan_clone.checkpoint.hf import export_weights
from torchtitan_clone.observe.metrics import MetricsWriter
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.hub import EXPORT_FOLDER, export_files

logger = logging.getLogger("torchtitan_clone")


class Exporter:
    """Writes hf/step-N below the run's folder; training waits. A failed export is reported, and training continues."""

    def __init__(self, *, metrics: MetricsWriter) -> None:
        self._metrics = metrics
        self.failed_steps: set[int] = set()

    def export(self, step: int, *, engine: Engine) -> None:
        """Exports the weights of a step; a collective."""
        plan = engine.plan  # its rotary positions may be those of a later stage
        dtype = getattr(torch, plan.config.checkpoint.export_dtype)
        report = export_weights(
            plan.folder / EXPORT_FOLDER / f"step-{step}",
            tensors=engine.model_tensors(),
            pieces=plan.spec.hub_pieces(plan.model_tensors, args=plan.model_args),
            dtype=dtype,
            files=export_files(
                spec=plan.spec,
                model_args=plan.model_args,
                model=plan.config.model,
                tokenizer=plan.tokenizer,
                dtype=dtype,
            ),
        )
        if report.error is None:
            self._metrics.log_event(step, "weights exported", seconds=report.seconds, size_gib=report.gib)
            self._metrics.ledger.book("saving", report.seconds)
        else:
            logger.warning("step %d could not be exported: %s; training continues without it", step, report.error)
            self.failed_steps.add(step)
