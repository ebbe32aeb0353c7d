"""What a run does, resolved from its configuration before any data is read or any process group exists.

A run has phases: consecutive steps with the same frozen layers, mesh, shape of a batch and rotary positions. The phase
of a step is a pure function of the step and its global batch, so that a resumed run continues in the right one.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchtitan_clone.checkpoint.progress import Progress
from torchtitan_clone.config import Config, Degrees, resolved_degrees, resolved_global_batch_size, run_folder
from torchtitan_clone.config.resolved import checkpoint_folder, output_folder
from torchtitan_clone.config.schema import Validation
from torchtitan_clone.config.schema_training import MAX_STEPS, Distillation
from torchtitan_clone.config.stages import DataStage, Timeline, resolved_timeline
from torchtitan_clone.data import Tokenizer
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.kernels import has_bfloat16_units
from torchtitan_clone.parallel.fsdp import ShardingOptions, requests_fsdp
from torchtitan_clone.parallel.mesh import describe_mesh
from torchtitan_clone.parallel.stages import Stages, model_modules, resolved_stages

if TYPE_CHECKING:
    from torchtitan_clone.data.mixture import Mixture


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase; `config` is that of the run with the values of the phase."""

    first_step: int
    """First step with these frozen layers."""
    frozen_layers: int
    """Number of frozen layers, counted from the first; if above 0, the embedding is frozen too."""
    config: Config
    first_batch: int = 1
    """First global batch of the phase in data.stages."""


def phases(config: Config, world_size: int) -> list[Phase]:
    """Returns all phases that can occur, by their frozen layers and stages; run/rules.py checks their options.

    The batch of a step has its number, that of Timeline.batch_of_step(), or one in between where data.skip_steps has
    ranges that were trained before they were entered.
    """
    _, timeline = rows_and_timeline(config, world_size)
    firsts = [] if timeline is None else [stage.first_batch for stage in timeline.stages]
    starts = sorted({1} | {freeze.step for freeze in config.training.freeze_schedule})
    found: list[Phase] = []
    for start, following in zip(starts, [*starts[1:], MAX_STEPS + 1], strict=True):
        last = start if timeline is None else timeline.batch_of_step(following - 1)
        for batch in [start, *(first for first in firsts if start < first <= last)]:
            phase = phase_of_step(config, world_size, step=start, batch=batch)
            if not found or (phase.config, phase.frozen_layers) != (found[-1].config, found[-1].frozen_layers):
                found.append(phase)
    return found


def rows_and_timeline(config: Config, world_size: int) -> tuple[int, Timeline | None]:
    """Returns the rows of the first global batch and the stages of the data, if any."""
    degrees = resolved_degrees(config.parallelism, world_size)
    rows = resolved_global_batch_size(config.training, degrees, config.fault_tolerance)
    return rows, resolved_timeline(config.data, training=config.training, global_batch_size=rows)


def phase_of_step(config: Config, world_size: int, *, step: int, batch: int | None = None) -> Phase:
    """Returns the phase that a step belongs to; `batch` is its global batch; None: Timeline.batch_of_step()."""
    rows, timeline = rows_and_timeline(config, world_size)
    phase = _frozen_phase(config, step=step, rows=rows)
    if timeline is None:
        return phase
    stage = timeline.phase_stage(batch=batch or timeline.batch_of_step(step))
    phase = replace(phase, first_batch=stage.first_batch)
    if stage.first_batch == 1 and stage.engine_options == timeline.base.engine_options:
        return phase
    return replace(phase, config=_config_of_stage(phase.config, stage))


def _frozen_phase(config: Config, *, step: int, rows: int) -> Phase:
    found = Phase(first_step=1, frozen_layers=0, config=config)
    for freeze in config.training.freeze_schedule:
        if freeze.step > step:
            break
        before = found.config
        stages = before.parallelism.pipeline_parallel_degree
        pipeline = freeze.pipeline_parallel_degree or stages
        shard = before.parallelism.data_parallel_shard_degree
        if shard != -1:
            shard = shard * stages // pipeline
        now = replace(
            before,
            validation=_with_same_rows(before.validation, growth=stages // pipeline),
            training=replace(
                before.training,
                global_batch_size=rows,
                local_batch_size=freeze.local_batch_size or before.training.local_batch_size,
            ),
            parallelism=replace(
                before.parallelism, pipeline_parallel_degree=pipeline, data_parallel_shard_degree=shard
            ),
        )
        found = Phase(first_step=freeze.step, frozen_layers=freeze.layers, config=now)
    return found


def _with_same_rows(validation: Validation, *, growth: int) -> Validation:
    """Returns options that measure the same rows on `growth` times as many data-parallel ranks, or few more."""
    if validation.steps == -1 or growth < 2:
        return validation
    if validation.local_batch_size % growth == 0:
        # A batch has rows of one source: the same rows are batches of the same size.
        return replace(validation, local_batch_size=validation.local_batch_size // growth)
    return replace(validation, steps=-(-validation.steps // growth))


def _config_of_stage(config: Config, stage: DataStage) -> Config:
    """Returns the configuration with the values of a stage; validation keeps the tokens of a micro-batch."""
    training, validation = config.training, config.validation
    rotary = {"rope_theta": stage.rope_theta, "rope_scaling": stage.rope_scaling}
    changed = {key: value for key, value in rotary.items() if value is not None}
    return replace(
        config,
        model=replace(config.model, args=config.model.args | changed),
        training=replace(
            training,
            seq_len=stage.seq_len,
            global_batch_size=stage.global_batch_size,
            local_batch_size=stage.local_batch_size,
        ),
        validation=replace(
            validation, local_batch_size=max(1, validation.local_batch_size * training.seq_len // stage.seq_len)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The model, the mesh and the batches of one phase of a run."""

    config: Config
    folder: Path
    spec: ModelSpec
    model_args: ModelArgs
    tokenizer: Tokenizer
    device_type: str
    degrees: Degrees
    stages: Stages
    pipeline_summary: str
    global_batch_size: int
    first_step: int = 1
    """First step of the phase."""
    first_batch: int = 1
    """First global batch of the phase in data.stages."""
    frozen_layers: int = 0
    """Number of frozen layers, counted from the first; if above 0, the embedding is frozen too."""
    mixture: "Mixture | None" = None
    """The order of the samples of the run, if it has sources or stages."""
    plans: "dict[tuple[int, int], RunPlan]" = field(default_factory=dict, init=False, repr=False, compare=False)
    """Those of other phases that were asked for: building one can take the time of building the model."""

    def at_step(self, step: int, *, batch: int | None = None) -> "RunPlan":
        """Returns the plan of the phase that a step belongs to; call it on the plan of the first phase.

        `batch` is the global batch of the step; None: that of a run whose data.skip_steps was set from the start.
        """
        return _of_phase(self, phase_of_step(self.config, self.world_size, step=step, batch=batch))

    @property
    def world_size(self) -> int:
        return self.degrees.world_size

    @property
    def last_step(self) -> int:
        """The step after which the run is complete."""
        return 0 if self.config.checkpoint.create_seed_checkpoint else self.config.training.steps

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        return tuple(model_modules(self.model_args.n_layers)[: self.frozen_layers + 1]) if self.frozen_layers else ()

    @property
    def frozen_stages(self) -> int:
        """Number of pipeline stages, counted from the first, in which every module is frozen."""
        frozen = set(self.frozen_modules)
        return next(index for index, modules in enumerate(self.stages.modules) if set(modules) - frozen)

    @cached_property
    def loss_rank(self) -> int:
        """Rank of the pipeline axis that computes the loss."""
        return self.stages.ranks[-1]

    @property
    def output_folder(self) -> Path:
        """Folder of what this replica group writes by itself; the checkpoint folder is shared by all groups."""
        return output_folder(self.config)

    @property
    def checkpoint_folder(self) -> Path:
        return checkpoint_folder(self.folder, checkpoint=self.config.checkpoint)

    @property
    def num_replica_groups(self) -> int:
        """Number of replica groups when all are alive."""
        return self.config.fault_tolerance.group_size if self.config.fault_tolerance.enable else 1

    @property
    def microbatches(self) -> int:
        """Number of micro-batches, of training.local_batch_size sequences each, that a rank trains in a step."""
        rows = self.degrees.data * self.num_replica_groups * self.config.training.local_batch_size
        return self.global_batch_size // rows

    @cached_property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch_size * self.config.training.seq_len

    @cached_property
    def model_tensors(self) -> dict[str, Tensor]:
        """All parameters and persistent buffers by name, on the meta device and in the model's order."""
        return self.spec.state_on_meta(self.model_args)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name, on the meta device; a tied one once."""
        return {name: tensor for name, tensor in self.model_tensors.items() if isinstance(tensor, nn.Parameter)}

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those of all parameters that are not frozen."""
        frozen = tuple(f"{module}." for module in self.frozen_modules)
        return {name: p for name, p in self.parameters.items() if p.requires_grad and not name.startswith(frozen)}

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per token; of frozen layers forward only."""
        seq_len = self.config.training.seq_len
        return self.spec.flops_per_token(
            self.model_args, parameters=self.parameters, seq_len=seq_len, frozen_layers=self.frozen_layers
        )


def _of_phase(first: RunPlan, phase: Phase) -> RunPlan:
    key = (phase.first_step, phase.first_batch)
    if key == (1, 1) and phase.config is first.config:
        return first
    if key not in first.plans:
        model_args = first.model_args
        if phase.config.model.args != first.config.model.args:
            model_args = first.spec.resolve_args(phase.config.model)
        stages = _stages(phase.config, spec=first.spec, model_args=model_args, frozen_layers=phase.frozen_layers)
        first.plans[key] = replace(
            first,
            config=phase.config,
            model_args=model_args,
            global_batch_size=phase.config.training.global_batch_size,
            first_batch=phase.first_batch,
            degrees=resolved_degrees(phase.config.parallelism, first.world_size),
            stages=stages,
            pipeline_summary=_describe_pipeline(phase.config, stages=stages),
            first_step=phase.first_step,
            frozen_layers=phase.frozen_layers,
        )
    return first.plans[key]


def later_phases(first: RunPlan) -> list[RunPlan]:
    """Returns the plan of each phase that can occur after that of the first step and up to the last."""
    found = [_of_phase(first, phase) for phase in phases(first.config, first.world_size)]
    steps = first.config.training.steps
    return [plan for plan in found if plan is not first.at_step(1) and first_step_of(plan) <= steps]


def first_step_of(plan: RunPlan) -> int:
    """Returns the first step of a phase, in a run whose data.skip_steps was set from the start."""
    skipped = plan.mixture.timeline.skipped if plan.mixture else ()
    passed_over = sum(min(last + 1, plan.first_batch) - first for first, last in skipped if first < plan.first_batch)
    return max(plan.first_step, plan.first_batch - passed_over)


def build_plan(
    config: Config, *, world_size: int, spec: ModelSpec, model_args: ModelArgs, tokenizer: Tokenizer,
    device_type: str = "cpu",
) -> RunPlan:  # fmt: skip
    """Resolves sizes that the configuration leaves open; run/rules.py finds what does not fit."""
    degrees = resolved_degrees(config.parallelism, world_size)
    stages = _stages(config, spec=spec, model_args=model_args)
    rows = resolved_global_batch_size(config.training, degrees, config.fault_tolerance)
    timeline = resolved_timeline(config.data, training=config.training, global_batch_size=rows)
    return RunPlan(
        config=config,
        folder=run_folder(config.job),
        spec=spec,
        model_args=model_args,
        tokenizer=tokenizer,
        device_type=device_type,
        degrees=degrees,
        stages=stages,
        pipeline_summary=_describe_pipeline(config, stages=stages),
        global_batch_size=rows,
        mixture=None if timeline is None else _build_mixture(timeline, seed=config.debug.seed),
    )


def _build_mixture(timeline: Timeline, *, seed: int) -> "Mixture":
    from torchtitan_clone.data.mixture import Mixture  # not before: most runs have one source

    return Mixture(timeline, seed=seed)


def plan_on_mesh(plan: RunPlan, *, config: Config, world_size: int, layer_costs: list[int]) -> RunPlan:
    """Returns the plan of the same model with other degrees and batches, quickly; nothing is checked."""
    stages = _stages(config, spec=plan.spec, model_args=plan.model_args, layer_costs=layer_costs)
    rows = config.training.global_batch_size
    degrees = resolved_degrees(config.parallelism, world_size)
    return replace(plan, config=config, degrees=degrees, stages=stages, pipeline_summary="", global_batch_size=rows)


def plan_after(progress: Progress, *, first: RunPlan) -> RunPlan:
    """Returns the plan of the step after a progress, whose position in the data the loader checks.

    After the last step it is the plan of that step, which a run may still have to export.
    """
    is_complete = progress.step > 0 and progress.step == first.config.training.steps
    step = progress.step if is_complete else progress.step + 1
    samples = progress.data.get("samples")
    if first.mixture is None or type(samples) is not int or samples < 0:
        return first.at_step(step)
    timeline = first.mixture.timeline
    following = timeline.batch_at(samples)
    return first.at_step(step, batch=max(1, following - 1) if is_complete else timeline.unskipped(following))


def plan_of(progress: Progress, *, first: RunPlan) -> RunPlan:
    """Returns the plan of the last step of a progress, whatever data.skip_steps was by then; of step 1 without one."""
    begun = cast("list[dict[str, int]]", progress.data.get("stages") or [])
    return first.at_step(max(1, progress.step), batch=begun[-1]["first_step"] if begun else None)


def _stages(
    config: Config,
    *,
    spec: ModelSpec,
    model_args: ModelArgs,
    frozen_layers: int = 0,
    layer_costs: list[int] | None = None,
) -> Stages:
    pipelined = config.parallelism.pipeline_parallel_degree > 1  # costs take the time of building the model
    costs = (layer_costs or spec.layer_costs(model_args, seq_len=config.training.seq_len)) if pipelined else None
    sizes = {"n_layers": model_args.n_layers, "frozen_layers": frozen_layers}
    costs = costs and costs[: model_args.n_layers]
    stages = resolved_stages(config.parallelism, layer_costs=costs, **sizes)
    # The layers of multi-token prediction need the final hidden states.
    after = [f"layers.{model_args.n_layers + depth}" for depth in range(model_args.mtp_depth)]
    return replace(stages, modules=(*stages.modules[:-1], (*stages.modules[-1], *after)))


def _describe_pipeline(config: Config, *, stages: Stages) -> str:
    """Returns one line about the pipeline, or nothing without one."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return ""
    from torchtitan_clone.parallel.pipeline import describe_pipeline

    return describe_pipeline(config.parallelism, stages=stages, rows=config.training.local_batch_size)


def replica_identity(plan: RunPlan) -> str:
    """Returns what replica groups that train together must share, as text; fault_tolerance.group_size may differ."""
    config, options = plan.config, plan.config.fault_tolerance
    averages = (
        options.semi_sync_method, options.sync_steps, options.num_fragments, options.module_fqns_per_model_fragment,
        options.fragment_sync_delay, options.fragment_update_alpha,
    )  # fmt: skip
    sizes = (plan.global_batch_size, plan.degrees, plan.stages)
    texts = (config.data.held_out_fraction, config.metrics.statistics_freq, plan.tokenizer.fingerprint)
    return _trained_options(config) + repr((sizes, averages, config.quantize, config.ema, *texts))


def _trained_options(config: Config) -> str:
    """Returns options that decide what is trained, as text; the location of the data may differ."""
    training = replace(config.training, dataset_path=None)
    sources = [replace(source, path=None) for source in config.data.sources]
    data = (sources, config.data.stages, config.data.skip_steps, config.data.packing, config.data.drop_duplicates)
    debug = (config.debug.seed, config.debug.moe_force_load_balance)
    teacher: list[Distillation] = []
    if config.distillation.is_enabled:
        from torchtitan_clone.run.weights_folder import with_digest

        teacher.append(with_digest(config.distillation))
    return repr((config.model, training, config.optimizer, config.lr_scheduler, *debug, *data, *teacher))


def run_identity(plan: RunPlan) -> str:
    """Returns what determines what the steps of a run train, without their number, as text."""
    same = {"steps": 1, "max_seconds": None, "gc_freq": 1, "max_skipped_steps": 0, "enable_cpu_offload": False}
    training = replace(plan.config.training, **same)
    model = replace(plan.config.model, hf_assets_path=plan.tokenizer.fingerprint)
    return _trained_options(replace(plan.config, model=model, training=training))


def total_tokens(plan: RunPlan) -> int:
    """Returns the tokens of the whole run, given the plan of its first phase."""
    steps = plan.config.training.steps
    if plan.mixture is None:
        return plan.tokens_per_step * steps
    timeline = plan.mixture.timeline
    return sum(plan.mixture.tokens_before(timeline.first_sample(batch=timeline.batch_of_step(steps) + 1)))


def is_export_due(config: Config, *, step: int) -> bool:
    """Returns whether the options ask for an export in the Hugging Face format after this step."""
    options = config.checkpoint
    is_last = step == config.training.steps and options.last_save_in_hf
    return is_last or (options.hf_export_interval > 0 and step % options.hf_export_interval == 0)


def describe_phase(plan: RunPlan) -> str:
    """Returns what begins with a phase."""
    rows = f"{plan.global_batch_size:,} sequences of {plan.config.training.seq_len:,} tokens"
    return f"{rows}, {plan.frozen_layers} layers frozen, {describe_mesh(plan.degrees).partition(chr(10))[0]}"


def resolved_precision(config: Config, *, device_type: str) -> Config:
    """Returns the configuration with training.mixed_precision_param resolved where it is "auto"."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return config
    is_fast = device_type != "cpu" or has_bfloat16_units()
    dtype = "bfloat16" if is_fast or training.dtype == "bfloat16" else "float32"
    return replace(config, training=replace(training, mixed_precision_param=dtype))


class _Chunks(NamedTuple):
    """The bytes of a chunk's logits with which products are about as fast as with all, and bounds of its tokens."""

    logits: int
    least: int
    most: int


_CHUNKS = {"cpu": _Chunks(logits=2**27, least=512, most=1024), "cuda": _Chunks(logits=2**28, least=1024, most=2**30)}


def loss_chunk_tokens(plan: RunPlan) -> int:
    """Returns the tokens of a chunk of the loss: training.loss_chunk_tokens, or what suits the device."""
    training = plan.config.training
    if training.loss_chunk_tokens != -1:
        return training.loss_chunk_tokens
    logits, least, most = _CHUNKS[plan.device_type]
    fitting = logits // (getattr(torch, training.mixed_precision_param).itemsize * plan.model_args.vocab_size)
    return min(max(least, 1 << max(0, fitting.bit_length() - 1)), most)


_GROUP_BYTES = 16 << 20
"""Bytes of weights of a group of blocks on a CPU, at most: of small ones, collectives cost more than their bytes do."""


def sharding_options(plan: RunPlan) -> ShardingOptions:
    """Returns how FSDP groups blocks, and whether gradients stay in the data type of backward.

    They do on a single rank without FSDP, except in a replica group, which adds them up.
    """
    keeps_gradients = is_without_fsdp(plan) and not plan.config.fault_tolerance.enable
    return ShardingOptions(blocks_per_group=_blocks_per_group(plan), keeps_gradients=keeps_gradients)


def _blocks_per_group(plan: RunPlan) -> int:
    """Returns how many blocks FSDP shards together: parallelism.fsdp_blocks_per_group, or what suits the device."""
    parallelism, training = plan.config.parallelism, plan.config.training
    if parallelism.fsdp_blocks_per_group != -1:
        return parallelism.fsdp_blocks_per_group
    if plan.device_type != "cpu":
        return 1
    elements = Counter[str]()
    for name, parameter in plan.parameters.items():
        if name.startswith("layers."):
            elements[name.split(".")[1]] += parameter.numel()
    size = max(elements.values()) * getattr(torch, training.mixed_precision_param).itemsize
    return max(1, _GROUP_BYTES * plan.degrees.tp // size)


def is_without_fsdp(plan: RunPlan) -> bool:
    """Returns whether a single rank trains without FSDP."""
    return plan.world_size == 1 and not requests_fsdp(plan.config.training, parallelism=plan.config.parallelism)
