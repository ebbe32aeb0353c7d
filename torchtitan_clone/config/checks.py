"""Rules of a configuration's tables that a type annotation cannot express.

Each rule is a function of plain values that yields messages: what is wrong with which value, and what to change.
Rules that relate the mesh, the model and the data are in run/rules.py.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.config.remedies import either, nearest_multiples
from torchtitan_clone.config.schema import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Config,
    LRScheduler,
    Optimizer,
    Profiling,
    Slurm,
    Training,
    Validation,
)

Bound = tuple[str, Callable[[Any], bool]]


def find_config_errors(config: Config, *, device_type: str) -> list[str]:
    """Returns one message per violated rule."""
    out_of_bounds = list(find_bound_errors(config))
    found = [
        *out_of_bounds,
        *_find_precision_errors(config.training),
        *_find_recompute_errors(config.activation_checkpoint),
        *_find_compile_errors(config.compile),
        *_find_profiling_errors(config.profiling, device_type),
        *_find_validation_errors(config.validation, config.data.held_out_fraction),
        *_find_replica_group_errors(config, device_type),
        *_find_excluded_state_errors(config.checkpoint),
        *_find_folder_errors(config),
        *_find_async_tensor_errors(config, device_type),
        *_find_slurm_errors(config.slurm),
    ]
    if not out_of_bounds:  # this rule assumes values within their bounds
        found += _find_schedule_errors(config.lr_scheduler, config.training.steps)
    return found


def _at_least(low: int) -> Bound:
    return f"at least {low}", lambda value: value >= low


AUTO_OR_POSITIVE: Bound = "-1 or at least 1", lambda value: value == -1 or value >= 1
POSITIVE: Bound = "a number above 0", lambda value: 0 < value < math.inf
UNSET_OR_POSITIVE: Bound = "unset, or a number above 0", lambda value: value is None or 0 < value < math.inf
FRACTION: Bound = "at least 0 and below 1", lambda value: 0 <= value < 1

BOUNDS: dict[str, Bound] = {
    "training.seq_len": _at_least(1),
    "training.local_batch_size": _at_least(1),
    "training.global_batch_size": AUTO_OR_POSITIVE,
    "training.steps": _at_least(1),
    "training.max_norm": ("above 0 (inf never scales gradients)", lambda value: value > 0),
    "training.loss_chunk_tokens": _at_least(1),
    "training.max_skipped_steps": _at_least(0),
    "training.gc_freq": _at_least(1),
    "training.max_seconds": UNSET_OR_POSITIVE,
    "data.num_workers": _at_least(0),
    "data.prepare_processes": AUTO_OR_POSITIVE,
    "data.held_out_fraction": FRACTION,
    "data.max_bad_rows": _at_least(0),
    "optimizer.lr": POSITIVE,
    "optimizer.beta1": FRACTION,
    "optimizer.beta2": FRACTION,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": ("a number of at least 0", lambda value: 0 <= value < math.inf),
    "lr_scheduler.warmup_steps": _at_least(0),
    "lr_scheduler.decay_ratio": ("unset, or above 0 and at most 1", lambda value: value is None or 0 < value <= 1),
    "lr_scheduler.min_lr_factor": ("between 0 and 1", lambda value: 0 <= value <= 1),
    "parallelism.data_parallel_replicate_degree": _at_least(1),
    "parallelism.data_parallel_shard_degree": AUTO_OR_POSITIVE,
    "parallelism.fsdp_prefetch_blocks": _at_least(1),
    "parallelism.tensor_parallel_degree": _at_least(1),
    "parallelism.pipeline_parallel_degree": _at_least(1),
    "parallelism.context_parallel_degree": _at_least(1),
    "parallelism.pipeline_parallel_microbatch_size": _at_least(1),
    "parallelism.pipeline_parallel_layers_per_stage": (
        "unset or at least 1",
        lambda value: value is None or value >= 1,
    ),
    "parallelism.pipeline_parallel_first_stage_less_layers": _at_least(0),
    "parallelism.pipeline_parallel_last_stage_less_layers": _at_least(0),
    "checkpoint.interval": _at_least(1),
    "checkpoint.interval_minutes": UNSET_OR_POSITIVE,
    "checkpoint.keep_latest_k": _at_least(0),
    "checkpoint.keep_every": _at_least(0),
    "checkpoint.writer_timeout_seconds": POSITIVE,
    "checkpoint.load_step": ("-1 or at least 0", lambda value: value >= -1),
    "preemption.deadline_seconds": UNSET_OR_POSITIVE,
    "checkpoint.hf_export_interval": _at_least(0),
    "metrics.log_freq": _at_least(1),
    "profiling.profile_freq": _at_least(1),
    "profiling.profiler_warmup": _at_least(0),
    "profiling.profiler_active": _at_least(1),
    "comm.init_timeout_seconds": _at_least(1),
    "comm.train_timeout_seconds": _at_least(1),
    "comm.trace_buf_size": _at_least(0),
    "comm.straggler_freq": _at_least(0),
    "validation.freq": _at_least(1),
    "validation.steps": AUTO_OR_POSITIVE,
    "validation.local_batch_size": _at_least(1),
    "fault_tolerance.process_group_timeout_ms": _at_least(1),
    "fault_tolerance.replica_id": _at_least(0),
    "fault_tolerance.group_size": _at_least(0),
    "fault_tolerance.min_replica_size": _at_least(1),
    "fault_tolerance.stall_factor": ("a number of at least 1", lambda value: 1 <= value < math.inf),
    "fault_tolerance.sync_steps": _at_least(1),
    "fault_tolerance.num_fragments": _at_least(1),
    "fault_tolerance.fragment_sync_delay": _at_least(0),
    "fault_tolerance.fragment_update_alpha": ("between 0 and 1", lambda value: 0 <= value <= 1),
    "fault_tolerance.heartbeat_timeout_ms": _at_least(1),
    "fault_tolerance.join_timeout_ms": _at_least(1),
    "slurm.nodes": _at_least(1),
    "slurm.gpus_per_node": _at_least(0),
    "slurm.processes_per_node": UNSET_OR_POSITIVE,
    "slurm.cpus_per_node": UNSET_OR_POSITIVE,
    "slurm.signal_seconds": _at_least(1),
    "slurm.max_starts_without_progress": _at_least(1),
    "debug.seed": _at_least(0),
}


def find_bound_errors(config: Config) -> Iterator[str]:
    """Yields one message per option whose value is outside its range."""
    for name, (wording, holds) in BOUNDS.items():
        table, key = name.split(".")
        value = getattr(getattr(config, table), key)
        if not holds(value):
            yield f"{name} = {toml_like(value)}: must be {wording}."
    yield from _find_group_bound_errors(config.optimizer)


def _find_group_bound_errors(optimizer: Optimizer) -> Iterator[str]:
    """Applies the bounds of the [optimizer] options to the entries of optimizer.groups."""
    for group in optimizer.groups:
        for key, value in vars(group).items():
            bound = BOUNDS.get(f"optimizer.{key}")
            if bound and value is not None and not bound[1](value):
                yield f'optimizer.groups, pattern "{group.pattern}": {key} = {toml_like(value)} must be {bound[0]}.'


def _find_async_tensor_errors(config: Config, device_type: str) -> Iterator[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    compiles_model = config.compile.enable and "model" in config.compile.components
    requirements = {
        f"requires CUDA, and this run is on {device_type}; set it to false.": device_type == "cuda",
        "requires the compiled model; set compile.enable to true and add model to compile.components, or set it to "
        "false.": compiles_model,
        "parallelism.tensor_parallel_degree is 1; increase the degree, or set it to false.": (
            config.parallelism.tensor_parallel_degree > 1
        ),
    }
    for problem in (problem for problem, is_met in requirements.items() if not is_met):
        yield f"parallelism.enable_async_tensor_parallel = true: {problem}"


def _find_precision_errors(training: Training) -> Iterator[str]:
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        yield (
            'training.mixed_precision_param = "float32": more precise than the master weights, training.dtype = '
            '"bfloat16"; set training.mixed_precision_param to "bfloat16" or training.dtype to "float32".'
        )


def _find_schedule_errors(lr_scheduler: LRScheduler, steps: int) -> Iterator[str]:
    if lr_scheduler.warmup_steps > steps:
        yield (
            f"lr_scheduler.warmup_steps = {lr_scheduler.warmup_steps}: exceeds training.steps {steps}, so the "
            f"learning rate never reaches optimizer.lr; set it to at most {steps}."
        )


def _find_recompute_errors(activation_checkpoint: ActivationCheckpoint) -> Iterator[str]:
    option = activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        yield (
            f'activation_checkpoint.selective_ac_option = "{option}": must be "op", or a positive integer n that '
            'recomputes every n-th block, for example "2".'
        )


def _find_compile_errors(compile: Compile) -> Iterator[str]:
    if compile.enable and not compile.components:
        yield (
            "compile.components = []: compile.enable is true but no component is selected; add model or loss, or set "
            "compile.enable to false."
        )


def _find_profiling_errors(profiling: Profiling, device_type: str) -> Iterator[str]:
    if profiling.enable_memory_snapshot and device_type != "cuda":
        yield (
            f"profiling.enable_memory_snapshot = true: memory snapshots require CUDA, and this run is on "
            f"{device_type}; set it to false."
        )
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and needed > profiling.profile_freq:
        yield (
            f"profiling.profile_freq = {profiling.profile_freq}: less than profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}; set it to at least {needed}."
        )


def _find_validation_errors(validation: Validation, held_out_fraction: float) -> Iterator[str]:
    if validation.enable and held_out_fraction == 0:
        yield (
            "validation.enable = true: data.held_out_fraction = 0 holds out no documents; set "
            "data.held_out_fraction to 0.01, or validation.enable to false."
        )


def _find_replica_group_errors(config: Config, device_type: str) -> Iterator[str]:
    options = config.fault_tolerance
    if not options.enable:
        return
    if options.group_size < 1:
        yield (
            "fault_tolerance.group_size = 0: must be at least 1 with fault_tolerance.enable; set it to the number of "
            "replica groups."
        )
        return
    for key, highest in (("replica_id", options.group_size - 1), ("min_replica_size", options.group_size)):
        if getattr(options, key) > highest:
            yield (
                f"fault_tolerance.{key} = {getattr(options, key)}: must be at most {highest} with "
                f"fault_tolerance.group_size {options.group_size}."
            )
    if options.process_group == "nccl" and (device_type != "cuda" or config.training.enable_cpu_offload):
        where = "offloaded to host memory" if device_type == "cuda" else f"on {device_type}"
        yield f'fault_tolerance.process_group = "nccl": gradients are {where}; set it to "gloo".'
    if options.join_timeout_ms <= options.process_group_timeout_ms:
        yield (
            f"fault_tolerance.join_timeout_ms = {options.join_timeout_ms}: the lighthouse would drop a replica group "
            f"that waits for process_group_timeout_ms; set it to more than {options.process_group_timeout_ms}."
        )
    if options.semi_sync_method is not None:
        yield from _find_semi_sync_errors(config)


def _find_semi_sync_errors(config: Config) -> Iterator[str]:
    options = config.fault_tolerance
    fragments = len(options.module_fqns_per_model_fragment) or options.num_fragments
    round_steps, rest = divmod(options.sync_steps, fragments)
    if rest or not round_steps:
        yield (
            f"fault_tolerance.sync_steps = {options.sync_steps}: not a multiple of the number of fragments "
            f"{fragments}; set it to {either(nearest_multiples(fragments, options.sync_steps))}."
        )
        return
    if options.fragment_sync_delay >= round_steps:
        yield (
            f"fault_tolerance.fragment_sync_delay = {options.fragment_sync_delay}: must be less than the interval "
            f"between two averages, {round_steps} steps; set it to at most {round_steps - 1}."
        )
    for key, value in (("training.steps", config.training.steps), ("checkpoint.interval", config.checkpoint.interval)):
        if value % round_steps:
            yield (
                f"{key} = {value}: not a multiple of the {round_steps} steps between two averages, after which all "
                f"replica groups hold equal weights; set it to {either(nearest_multiples(round_steps, value))}."
            )


EXCLUDABLE = ("model", "optimizer", "rng", "data")


def _find_excluded_state_errors(checkpoint: Checkpoint) -> Iterator[str]:
    for name in checkpoint.exclude_from_loading:
        if name.split("/")[0] not in EXCLUDABLE:
            yield (
                f'checkpoint.exclude_from_loading = ["{name}"]: unknown state; use '
                f"{', '.join(EXCLUDABLE)}, or a name such as model/output.weight or optimizer/output.weight."
            )


def _find_folder_errors(config: Config) -> Iterator[str]:
    """Rejects URLs: pathlib would create a local folder named like the URL."""
    folders = {
        "job.dump_folder": config.job.dump_folder,
        "checkpoint.folder": config.checkpoint.folder,
        "checkpoint.initial_load_path": config.checkpoint.initial_load_path or "",
    }
    for name, value in folders.items():
        if "://" in value:
            yield f'{name} = "{value}": object stores are not supported; set it to a local or mounted folder.'


SLURM_TIMES = (r"(?P<m>\d+)(:(?P<s>\d+))?", r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
               r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?")  # fmt: skip
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def _find_slurm_errors(slurm: Slurm) -> Iterator[str]:
    found = [match for pattern in SLURM_TIMES if slurm.time and (match := re.fullmatch(pattern, slurm.time))]
    seconds = sum(int(number or 0) * SECONDS[unit] for match in found for unit, number in match.groupdict().items())
    if slurm.time and slurm.time != "UNLIMITED" and not seconds:
        yield (
            f'slurm.time = "{slurm.time}": not in Slurm\'s format; for example "90" (minutes), "12:00:00", '
            '"1-12:00:00" or "UNLIMITED".'
        )
    if 0 < seconds <= slurm.signal_seconds:
        yield (
            f"slurm.signal_seconds = {slurm.signal_seconds}: must be less than slurm.time "
            f'"{slurm.time}" = {seconds} s; decrease it, or increase slurm.time.'
        )
    for name in slurm.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield f'slurm.environment: "{name}" is not a valid name of an environment variable; rename it.'
