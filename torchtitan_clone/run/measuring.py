"""The metrics of a run: what the writer must know of the plan and the device, and what the report reads beside them."""

import logging
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.observe.flops import peak_flops_per_second
from torchtitan_clone.observe.metrics import AUXILIARY, MetricsWriter, speed_columns
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
from torchtitan_clone.run.folder import RunFolder
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.state import RunState, StepResult

logger = logging.getLogger("torchtitan_clone")

MAX_ACTIONS = 4_000
"""Of a pass through the pipeline, in the order of their start."""


def build_run_metrics(
    plan: RunPlan, *, launch: Launch, device: torch.device, age_seconds: float, folder: RunFolder | None
) -> MetricsWriter:
    """Builds the metrics writer of a run; `age_seconds` is the age of the process. Rank 0 has a `folder`."""
    config = plan.config
    if launch.rank == 0:
        _record_pipeline(plan)
    return MetricsWriter(
        config.metrics,
        folder=plan.output_folder,
        rank=launch.rank,
        total_steps=config.training.steps,
        run_config=asdict(config),
        environment=describe_environment(device=_device_name(device), ranks=launch.world_size),
        started=time.time() - age_seconds,
        ensure_folder=folder.ensure if folder is not None else lambda: None,
    )


def log_step(metrics: MetricsWriter, *, result: StepResult, state: RunState, is_first: bool) -> None:
    """Logs a committed step if it is due, the first or last of this process, and what tokens its experts had."""
    plan = state.engine.plan
    is_due = result.step == plan.last_step or result.step % plan.config.metrics.log_freq == 0
    if is_first or result.stop or is_due:
        _log_row(metrics, result=result, state=state)
    if is_first:
        metrics.log_goodput(result.step)
    metrics.progress(result.step)


def _log_row(metrics: MetricsWriter, *, result: StepResult, state: RunState) -> None:
    plan = state.engine.plan
    metrics.log(result.step, step_columns(result, state=state, seconds=metrics.mean_seconds()))
    if result.loads and metrics.active:
        loads = {name: counts_E.tolist() for name, counts_E in result.loads.items()}
        replace_record(plan.output_folder / LOADS_FILE, {"step": result.step, "loads": loads})


def step_columns(result: StepResult, *, state: RunState, seconds: tuple[float, float]) -> dict[str, float]:
    """Returns the columns of a step in metrics.jsonl; `seconds` are means since the last row: of a step, its data."""
    plan, device = state.engine.plan, state.engine.device
    step_seconds, data_seconds = seconds
    batch, tokens, epochs = state.loader.source_progress()
    peak = peak_flops_per_second(_device_name(device), dtype=plan.config.training.mixed_precision_param)
    return {
        "loss": result.loss,  # mean over the target tokens of the global batch, in nats
        "grad_norm": result.grad_norm,  # before clipping
        "clipped": result.grad_norm > plan.config.training.max_norm,
        "lr": state.engine.lr,
        "tokens_seen": state.progress.tokens_seen,  # of all ranks since step 1 of the run
        "step_seconds": step_seconds,
        "data_seconds": data_seconds,  # portion of step_seconds spent waiting for data
        "memory_gib": peak_memory_gib(device),  # of this rank's device; on CPU, of the process
        "skipped_steps": state.progress.skipped_steps,  # of the run, for a non-finite loss or gradient norm
        **_prefixed("lr/", state.engine.optimizer.lr_of_groups),  # by the pattern of groups that set one
        **({} if batch is None else {"batch": batch}),  # number of the global batch in data.stages; of a mixture
        **{name: value for observer in state.engine.observers for name, value in observer.columns().items()},
        **_prefixed(AUXILIARY, result.auxiliary),  # additional loss terms per target token
        **_prefixed("router/", _load_columns(result.loads)),  # of the load of experts
        **_prefixed("tokens/", tokens),  # tokens that were trained of each source
        **_prefixed("epochs/", epochs),  # how many times each local source was read
        **speed_columns(
            tokens=plan.tokens_per_step,
            seconds=step_seconds,
            flops_per_token=plan.flops_per_token,
            peak_flops=peak and peak * plan.world_size * plan.num_replica_groups,
        ),
    }


def _load_columns(loads: Mapping[str, Tensor]) -> dict[str, float]:
    if not loads:
        return {}
    from torchtitan_clone.models.balancing import load_statistics  # not before: most models have no experts

    return load_statistics(loads)


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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
