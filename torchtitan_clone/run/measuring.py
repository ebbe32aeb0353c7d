"""The metrics of a run: what the writer must know of the plan and the device, and what the report reads beside them."""

import logging
import platform
import socket
import time
from dataclasses import asdict, astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from torchtitan_clone.models.balancing import load_statistics
from torchtitan_clone.observe.flops import peak_flops_per_second
from torchtitan_clone.observe.metrics import MetricsWriter, StepRecord
from torchtitan_clone.observe.profiling import peak_memory_gib
from torchtitan_clone.observe.records import (
    BREAKDOWNS_FILE,
    LOADS_FILE,
    PIPELINE_FILE,
    TIMELINE_FILE,
    append_record,
    replace_record,
)
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.parallel.stragglers import StragglerReport
from torchtitan_clone.run.outcome import StepResult
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.run_folder import RunFolder
from torchtitan_clone.run.run_state import RunState

logger = logging.getLogger("torchtitan_clone")

MAX_ACTIONS = 4_000
"""Of a pass through the pipeline, in the order of their start."""


def build_run_metrics(
    plan: RunPlan, *, launch: Launch, device: torch.device, age_seconds: float, folder: RunFolder | None
) -> MetricsWriter:
    """Builds the metrics writer of a run; `age_seconds` is the age of the process. Rank 0 has a `folder`."""
    config = plan.config
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if launch.rank == 0:
        _record_pipeline(plan)
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
        environment=describe_environment(device=name, ranks=launch.world_size),
        started=time.time() - age_seconds,
        ensure_folder=folder.ensure if folder is not None else lambda: None,
    )


def log_step(metrics: MetricsWriter, *, result: StepResult, state: RunState) -> None:
    """Logs a committed step, and what tokens its experts had."""
    plan = state.engine.plan
    step_seconds, data_seconds = metrics.mean_seconds()
    batch, tokens, epochs = state.loader.source_progress()
    metrics.log(
        StepRecord(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            clipped=result.grad_norm > plan.config.training.max_norm,
            lr=state.engine.lr,
            tokens_seen=state.progress.tokens_seen,
            step_seconds=step_seconds,
            data_seconds=data_seconds,
            memory_gib=peak_memory_gib(state.engine.device),
            skipped_steps=state.progress.skipped_steps,
            auxiliary=result.auxiliary,
            router=load_statistics(result.loads),
            batch=batch,
            tokens=tokens,
            epochs=epochs,
        )
    )
    if result.loads and metrics.active:
        loads = {name: counts_E.tolist() for name, counts_E in result.loads.items()}
        replace_record(plan.output_folder / LOADS_FILE, {"step": result.step, "loads": loads})


def log_stragglers(metrics: MetricsWriter, *, found: StragglerReport, state: RunState) -> None:
    """Warns of slow ranks and links, and records the seconds of every rank; nothing for steps without measurements."""
    if not (metrics.active and found.ranks):
        return
    for line in found.lines:
        logger.warning("step %d: %s", state.step, line)
    folder = state.engine.plan.output_folder
    ranks = [asdict(rank) for rank in found.ranks]
    seconds = {key: [rank[key] for rank in ranks] for key in ("data", "communication", "total", "link")}
    append_record(folder / BREAKDOWNS_FILE, {"step": state.step, "time": time.time(), **seconds})
    if found.spans:
        hosts = [rank.host for rank in found.ranks]
        timeline = {"step": state.step, "hosts": hosts, **seconds, "spans": found.spans}
        replace_record(folder / TIMELINE_FILE, timeline)


def describe_environment(*, device: str, ranks: int) -> dict[str, object]:
    """Returns the machine of this rank and the versions that it runs, as text by name."""
    versions = {name: _version(name) for name in ("torchtitan_clone", "torchft", "torchao", "transformers")}
    return {
        "host": socket.gethostname(),
        "ranks": ranks,
        "device": device,
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # that of the package does not tell for which device it was built
        **{name: found for name, found in versions.items() if found},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Returns the name of the processor where the system tells, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _record_pipeline(plan: RunPlan) -> None:
    """Writes the actions of a pass; nothing without a pipeline."""
    if plan.degrees.pp == 1:
        return
    from torchtitan_clone.parallel.pipeline import timed_actions

    options, training = plan.config.parallelism, plan.config.training
    microbatches = training.local_batch_size // options.pipeline_parallel_microbatch_size
    actions = timed_actions(options, stages=plan.stages, microbatches=microbatches)
    first = sorted(actions, key=lambda action: action.start)[:MAX_ACTIONS]
    record = {"summary": plan.pipeline_summary, "actions": [astuple(action) for action in first]}
    plan.output_folder.mkdir(parents=True, exist_ok=True)
    replace_record(plan.output_folder / PIPELINE_FILE, record)
