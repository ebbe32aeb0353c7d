"""The metrics of a run: what the writer must know of the plan and the device."""

import time
from dataclasses import asdict

import torch

from torchtitan_clone.observe.flops import peak_flops_per_second
from torchtitan_clone.observe.metrics import MetricsWriter, StepRecord
from torchtitan_clone.observe.profiling import peak_memory_gib
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.run.outcome import StepResult
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.run_folder import RunFolder
from torchtitan_clone.run.run_state import RunState


def build_run_metrics(
    plan: RunPlan, *, launch: Launch, device: torch.device, age_seconds: float, folder: RunFolder | None
) -> MetricsWriter:
    """Builds the metrics writer of a run; `age_seconds` is the age of the process. Rank 0 has a `folder`."""
    config = plan.config
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops_per_second(name, dtype=config.training.mixed_precision_param)
    return MetricsWriter(
        config.metrics,
        folder=plan.output_folder,
        rank=launch.rank,
        total_steps=config.training.steps,
        tokens_per_step=plan.tokens_per_step,
        flops_per_token=plan.flops_per_token,
        peak_flops=peak and peak * launch.world_size * plan.num_replica_groups,
        run_config=asdict(config),
        started=time.time() - age_seconds,
        ensure_folder=folder.ensure if folder is not None else lambda: None,
    )


def log_step(metrics: MetricsWriter, *, result: StepResult, state: RunState) -> None:
    """Logs a committed step."""
    step_seconds, data_seconds = metrics.mean_seconds()
    batch, tokens, epochs = state.loader.source_progress()
    metrics.log(
        StepRecord(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=state.engine.lr,
            tokens_seen=state.progress.tokens_seen,
            step_seconds=step_seconds,
            data_seconds=data_seconds,
            memory_gib=peak_memory_gib(state.engine.device),
            skipped_steps=state.progress.skipped_steps,
            auxiliary=result.auxiliary,
            router=result.router,
            batch=batch,
            tokens=tokens,
            epochs=epochs,
        )
    )
