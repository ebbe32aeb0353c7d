"""Descriptions of a run: at its start, and what --dry-run and comm.mode = "fake_backend" print."""

from torchtitan_clone.config import Config, changes_to_toml, to_toml
from torchtitan_clone.config.checks import find_config_errors
from torchtitan_clone.data import describe_data
from torchtitan_clone.documents import escape
from torchtitan_clone.models.spec import active_parameters
from torchtitan_clone.parallel.mesh import describe_mesh
from torchtitan_clone.run.plan import RunPlan, first_step_of, later_phases, total_tokens

MAX_DESCRIBED_RANKS = 4096
"""A mesh of more takes torch minutes, even simulated."""


DEVICE_TYPES = ("auto", "cpu", "cuda")
"""Values of job.dry_run_device that name no hardware table."""


def simulated_device_type(config: Config, *, present: str) -> str:
    """Returns the device type of a dry run or simulation: the option's, else cuda if the configuration needs it."""
    if config.job.dry_run_device != "auto":
        return config.job.dry_run_device
    errors = {device: len(find_config_errors(config, device_type=device)) for device in (present, "cuda")}
    return "cuda" if errors["cuda"] < errors[present] else present


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


def describe_run(plan: RunPlan, *, device_type: str, memory: str = "") -> str:
    """Returns the resolved configuration, the mesh, the sizes and, for several ranks, the layout of the weights.

    `memory` is a line on the memory of a rank. Of a simulated run also the memory of each pipeline rank on this type of
    device, and the collectives of a step.
    """
    text, plan = summary(plan) + memory, plan.at_step(1)
    simulated = plan.config.comm.mode == "fake_backend"
    if plan.world_size > 1 or simulated:
        from torchtitan_clone.run.simulate import describe_layouts, simulate
        from torchtitan_clone.run.step_memory import memory_table

        text += describe_layouts(plan) if 1 < plan.world_size <= MAX_DESCRIBED_RANKS else ""
        text += f"\n{memory_table(plan, device_type=device_type)}\n\n{simulate(plan)}" if simulated else ""
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
