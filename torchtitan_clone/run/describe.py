"""Descriptions of a run: at its start, what --dry-run and comm.mode = "fake_backend" print, and at its end."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from torchtitan_clone import doors
from torchtitan_clone.checkpoint.folder import step_folder
from torchtitan_clone.config import Config, ConfigError, changes_to_toml, to_toml
from torchtitan_clone.config.checks import find_device_errors
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.resolved import EXPORT_FOLDER
from torchtitan_clone.config.started import CHECKOUT, SCRIPTS, uses_checkout
from torchtitan_clone.config.urls import store_url
from torchtitan_clone.data import describe_data
from torchtitan_clone.documents import escape
from torchtitan_clone.models.spec import active_parameters
from torchtitan_clone.observe.metrics import METRICS_FILE
from torchtitan_clone.optim import build_schedule
from torchtitan_clone.parallel.mesh import Mesh, describe_mesh
from torchtitan_clone.run.disk import describe_disk
from torchtitan_clone.run.plan import RunPlan, first_step_of, later_phases, total_tokens

MAX_DESCRIBED_RANKS = 4096
"""A mesh of more takes torch minutes, even simulated."""


DEVICE_TYPES = ("auto", "cpu", "cuda")
"""Values of job.dry_run_device that name no hardware table."""


class Planner(Protocol):
    """What a package offers that predicts memory and time: `torchtitan_clone/planner/door.py`. Texts are of lines."""

    def names_hardware(self, config: Config) -> bool:
        """Returns whether job.dry_run_device names a hardware table; ConfigError for an unknown one."""
        ...

    def describe_memory(self, plan: RunPlan) -> str: ...
    def describe_layouts(self, plan: RunPlan) -> str: ...
    def describe_simulation(self, plan: RunPlan, *, device_type: str) -> str: ...
    def describe_time(self, plan: RunPlan) -> str: ...

    def trace_collectives(
        self, *, group_axes: Mapping[str, Sequence[str]], rank: int, folder: Path
    ) -> AbstractContextManager[None]:
        """Returns a context that logs the collectives inside it, and writes them into the run's folder."""
        ...


def find_planner() -> Planner | None:
    """Returns the package behind the door `planner`; None if it is closed."""
    return cast("Planner | None", doors.find("planner"))


def check_planner(config: Config) -> None:
    """Raises ConfigError if training needs the planner, and its door is closed."""
    if config.debug.trace_collectives and (reason := doors.why_closed("planner")):
        raise ConfigError(f"debug.trace_collectives: {reason}, or unset the option")


def trace_collectives(plan: RunPlan, *, mesh: Mesh, rank: int) -> AbstractContextManager[None]:
    """Returns a context that logs the collectives of a step inside it, and writes them into the run's folder."""
    planner = find_planner()
    assert planner is not None, "see check_planner()"
    return planner.trace_collectives(group_axes=mesh.group_axes(), rank=rank, folder=plan.output_folder)


def simulated_device_type(config: Config, *, present: str) -> str:
    """Returns the device type of a dry run or simulation: the option's, else cuda if the configuration needs it.

    ConfigError if the option or a simulation needs the planner, and its door is closed.
    """
    planner, device = find_planner(), config.job.dry_run_device
    if planner is None and (device not in DEVICE_TYPES or config.comm.mode == "fake_backend"):
        option = 'comm.mode = "fake_backend"' if device in DEVICE_TYPES else f"job.dry_run_device = {shown(device)}"
        raise ConfigError(f"{option}: {doors.why_closed('planner')}")
    if planner is not None and planner.names_hardware(config):
        return "cuda"
    if device != "auto":
        return device
    here, on_cuda = (len([*find_device_errors(config, device_type=each)]) for each in (present, "cuda"))
    return "cuda" if on_cuda < here else present


def one_line_summary(plan: RunPlan) -> str:
    """Returns the run in one line."""
    first = plan.at_step(1)
    config, pipeline = first.config, first.pipeline_summary
    parameters = _describe_parameters(plan, unit=" parameters")
    return (
        f"{config.model.name} {config.model.flavor}, {parameters}, "
        f"{config.training.steps:,} steps of {first.global_batch_size:,} sequences x {config.training.seq_len:,} = "
        f"{total_tokens(plan):,} tokens, in {plan.folder}{pipeline and '; ' + pipeline}"
    )


def _describe_parameters(plan: RunPlan, *, unit: str = "") -> str:
    """Returns the number of parameters and, where they differ, of those that process one token."""
    total = plan.parameter_count
    active = sum(parameter.numel() for parameter in active_parameters(plan.model_args, plan.parameters).values())
    return f"{total:,}{unit}" + (f", of which {active:,} process each token" if active < total else "")


def describe_run(plan: RunPlan, *, device_type: str) -> str:
    """Returns the resolved configuration, the mesh and the sizes; with the planner also what it predicts.

    That is the memory of a rank and, for several ranks, the layout of the weights. Of a simulated run instead of an
    estimate the memory of each pipeline rank on this type of device, and the collectives of a step.
    """
    text, first, planner = summary(plan), plan.at_step(1), find_planner()
    if planner is None:
        return text
    simulated = plan.config.comm.mode == "fake_backend"
    text += "" if simulated else planner.describe_memory(first)
    text += planner.describe_layouts(first) if 1 < first.world_size <= MAX_DESCRIBED_RANKS else ""
    text += planner.describe_simulation(first, device_type=device_type) if simulated else ""
    return text


def summary(plan: RunPlan) -> str:
    """Returns what follows from the configuration alone: the phase of the first step, then those that follow it."""
    first = plan.at_step(1)
    later = [phase for phase in later_phases(plan) if phase is plan.at_step(first_step_of(phase))]
    frozen = f"frozen            {', '.join(first.frozen_modules)}\n" if first.frozen_modules else ""
    return (
        f"{to_toml(plan.config) if plan.config.job.dry_run_all else changes_to_toml(plan.config)}\n"
        f"data              {escape(describe_data(training=plan.config.training, data=plan.config.data))}\n"
        f"tokenizer         {escape(plan.tokenizer.describe())}\n"
        f"mesh              {describe_mesh(first.degrees)}\n"
        f"pipeline          {first.pipeline_summary or 'none'}\n"
        f"parameters        {_describe_parameters(plan)}\n"
        f"{frozen}"
        f"FLOPs per token   {first.flops_per_token:,.0f}\n"
        f"tokens per step   {first.tokens_per_step:,} in {first.microbatches:,} micro-batches a rank\n"
        f"tokens of the run {total_tokens(plan):,}\n"
        f"checkpoints       {describe_disk(plan)}\n"
        f"run folder        {escape(str(plan.folder))}\n"
        f"{''.join(map(_describe_phase, later))}"
    )


def _describe_phase(plan: RunPlan) -> str:
    return (
        f"from step {first_step_of(plan)}\n"
        f"  frozen          {', '.join(plan.frozen_modules) or 'none'}\n"
        f"  tokens per step {plan.tokens_per_step:,} in {plan.global_batch_size:,} sequences\n"
        f"  mesh            {describe_mesh(plan.degrees)}\n"
        f"  pipeline        {plan.pipeline_summary or 'none'}\n"
        f"  FLOPs per token {plan.flops_per_token:,.0f}\n"
    )


JUMP = 1.1
"""A change of the learning rate by more than this factor is worth a line."""


def describe_results(plan: RunPlan) -> list[str]:
    """Returns where the results of a complete run are, and the commands that go on from them, one a line."""
    config, folder, step = plan.config, plan.folder, plan.config.training.steps
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    exports = config.checkpoint.last_save_in_hf
    export, checkpoint = folder / EXPORT_FOLDER / f"step-{step}", step_folder(plan.checkpoint_folder, step)
    url = store_url(config.checkpoint)
    is_here = saves and (url is None or checkpoint.is_dir())  # in the store only if nodes share no folder
    events = plan.output_folder / config.metrics.save_tb_folder
    lines = {
        "metrics": f"{plan.output_folder / METRICS_FILE}",
        "TensorBoard": _quoted(*_python(), "-m", "tensorboard.main", "--logdir", events)
        if config.metrics.enable_tensorboard
        else "",
        "report": _command("report", folder),
        "checkpoint": f"{checkpoint}" if is_here else "",
        "stored": f"{url}/step-{step}" if saves and url else "",
        "copy": _command("checkpoint", "copy", url, "FOLDER") if saves and url and not is_here else "",
        "weights": f"{export}" if exports else "",
        "export": _command("convert to_hf", checkpoint, "FOLDER") if is_here and not exports else "",
        "generate": f'{_command("generate", folder if is_here else export)} --prompt="..."'
        if is_here or exports
        else "",
        "extend": f"rerun the same command with {describe_extension(config)}" if saves else "",
    }
    return [f"{name:<13}{escape(text)}" for name, text in lines.items() if text]


def describe_extension(config: Config) -> str:
    """Returns the option with which a complete run goes on, and how the learning rate would jump."""
    steps, lr = config.training.steps, config.optimizer.lr
    option = f"--training.steps={2 * steps}"
    last = lr * build_schedule(config.lr_scheduler, steps=steps)(steps)
    following = lr * build_schedule(config.lr_scheduler, steps=2 * steps)(steps + 1)
    if following <= JUMP * last:
        return option
    remedy = f"add --lr_scheduler.total_steps={steps} to keep the final rate"
    return (
        f"{option}: the learning rate would jump from {last:.2e} to {following:.2e}, because the schedule ends with "
        f"training.steps; {remedy}"
    )


def _command(name: str, *arguments: str | Path) -> str:
    """Returns a command of this package as the user can type it: with a script of this checkout, or the command."""
    if uses_checkout():
        return _quoted(*_python(), _shortened(CHECKOUT / SCRIPTS[name]), *arguments)
    program = Path(sys.executable).with_name("torchtitan_clone")
    if not program.exists():  # installed without its scripts
        return _quoted(*_python(), "-m", "torchtitan_clone", *name.split(), *arguments)
    return _quoted(_program(program), *name.split(), *arguments)


def _python() -> list[str]:
    return [_program(Path(sys.executable).with_name("python"), otherwise=Path(sys.executable))]


def _program(path: Path, *, otherwise: Path | None = None) -> str:
    """Returns the name of a program, which a shell finds in an active environment only, else its path."""
    found = shutil.which(path.name)
    return path.name if found is not None and Path(found).parent == path.parent else _shortened(otherwise or path)


def _quoted(*words: str | Path) -> str:
    return shlex.join(map(str, words))


def _shortened(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
