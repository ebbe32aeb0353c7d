"""Rules within the tables of a configuration that a type cannot express.

Every rule is a function of plain values that yields messages: what is wrong with which value, and what to change.
Rules between the mesh, the model and the data are in run/rules.py.
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
    """Returns one message for each rule within the tables that is broken."""
    out_of_bounds = list(find_bound_errors(config))
    found = [
        *out_of_bounds,
        *_precision(config.training),
        *_selective(config.activation_checkpoint),
        *_compile(config.compile),
        *_profiling(config.profiling, device_type),
        *_validation(config.validation, config.data.held_out_fraction),
        *_fault_tolerance(config, device_type),
        *_excluded(config.checkpoint),
        *_folders(config),
        *_async_tensor(config, device_type),
        *_slurm(config.slurm),
    ]
    if not out_of_bounds:  # the rule computes with these values
        found += _schedule(config.lr_scheduler, config.training.steps)
    return found


def _at_least(low: int) -> Bound:
    return f"at least {low}", lambda value: value >= low


OPEN_OR_ABOVE_0: Bound = "-1 or at least 1", lambda value: value == -1 or value >= 1
ABOVE_0: Bound = "a number above 0", lambda value: 0 < value < math.inf
UNSET_OR_ABOVE_0: Bound = "unset, or a number above 0", lambda value: value is None or 0 < value < math.inf
SHARE_BELOW_1: Bound = "at least 0 and below 1", lambda value: 0 <= value < 1

BOUNDS: dict[str, Bound] = {
    "training.seq_len": _at_least(1),
    "training.local_batch_size": _at_least(1),
    "training.global_batch_size": OPEN_OR_ABOVE_0,
    "training.steps": _at_least(1),
    "training.max_norm": ("above 0 (inf never scales gradients)", lambda value: value > 0),
    "training.loss_chunk_tokens": _at_least(1),
    "training.max_skipped_steps": _at_least(0),
    "training.gc_freq": _at_least(1),
    "training.max_seconds": UNSET_OR_ABOVE_0,
    "data.num_workers": _at_least(0),
    "data.prepare_processes": OPEN_OR_ABOVE_0,
    "data.held_out_fraction": SHARE_BELOW_1,
    "data.max_bad_rows": _at_least(0),
    "optimizer.lr": ABOVE_0,
    "optimizer.beta1": SHARE_BELOW_1,
    "optimizer.beta2": SHARE_BELOW_1,
    "optimizer.eps": ABOVE_0,
    "optimizer.weight_decay": ("a number of at least 0", lambda value: 0 <= value < math.inf),
    "lr_scheduler.warmup_steps": _at_least(0),
    "lr_scheduler.decay_ratio": ("unset, or above 0 and at most 1", lambda value: value is None or 0 < value <= 1),
    "lr_scheduler.min_lr_factor": ("between 0 and 1", lambda value: 0 <= value <= 1),
    "parallelism.data_parallel_replicate_degree": _at_least(1),
    "parallelism.data_parallel_shard_degree": OPEN_OR_ABOVE_0,
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
    "checkpoint.interval_minutes": UNSET_OR_ABOVE_0,
    "checkpoint.keep_latest_k": _at_least(0),
    "checkpoint.keep_every": _at_least(0),
    "checkpoint.writer_timeout_seconds": ABOVE_0,
    "checkpoint.load_step": ("-1 or at least 0", lambda value: value >= -1),
    "preemption.deadline_seconds": UNSET_OR_ABOVE_0,
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
    "validation.steps": OPEN_OR_ABOVE_0,
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
    "slurm.processes_per_node": UNSET_OR_ABOVE_0,
    "slurm.cpus_per_node": UNSET_OR_ABOVE_0,
    "slurm.signal_seconds": _at_least(1),
    "slurm.max_starts_without_progress": _at_least(1),
    "debug.seed": _at_least(0),
}


def find_bound_errors(config: Config) -> Iterator[str]:
    """Yields one message for each option whose value lies outside its range."""
    for name, (wording, holds) in BOUNDS.items():
        table, key = name.split(".")
        value = getattr(getattr(config, table), key)
        if not holds(value):
            yield f"{name} = {toml_like(value)}: must be {wording}."
    yield from _group_bound_errors(config.optimizer)


def _group_bound_errors(optimizer: Optimizer) -> Iterator[str]:
    """The bounds of an option of the table hold for the entries of optimizer.groups too."""
    for group in optimizer.groups:
        for key, value in vars(group).items():
            bound = BOUNDS.get(f"optimizer.{key}")
            if bound and value is not None and not bound[1](value):
                yield f'optimizer.groups, pattern "{group.pattern}": {key} = {toml_like(value)} must be {bound[0]}.'


def _async_tensor(config: Config, device_type: str) -> Iterator[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    lacking = {
        "it needs CUDA's symmetric memory": device_type == "cuda",
        "torch.compile does it, so compile.enable must be true and compile.components name model": config.compile.enable
        and "model" in config.compile.components,
        "parallelism.tensor_parallel_degree is 1": config.parallelism.tensor_parallel_degree > 1,
    }
    for reason in (reason for reason, there in lacking.items() if not there):
        yield f"parallelism.enable_async_tensor_parallel = true: {reason}; or set it to false."


def _precision(training: Training) -> Iterator[str]:
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        yield (
            'training.mixed_precision_param = "float32": more precise than the weights themselves (training.dtype = '
            '"bfloat16"); set training.mixed_precision_param to "bfloat16" or training.dtype to "float32".'
        )


def _schedule(lr_scheduler: LRScheduler, steps: int) -> Iterator[str]:
    if lr_scheduler.warmup_steps > steps:
        yield (
            f"lr_scheduler.warmup_steps = {lr_scheduler.warmup_steps}: more than training.steps {steps}, so the "
            f"learning rate never gets to optimizer.lr; set it to at most {steps}."
        )


def _selective(activation_checkpoint: ActivationCheckpoint) -> Iterator[str]:
    option = activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        yield (
            f'activation_checkpoint.selective_ac_option = "{option}": must be "op", or a number n to recompute every '
            'n-th block, for example "2".'
        )


def _compile(compile: Compile) -> Iterator[str]:
    if compile.enable and not compile.components:
        yield (
            "compile.components = []: leaves compile.enable nothing to compile; name model or loss, or set "
            "compile.enable to false."
        )


def _profiling(profiling: Profiling, device_type: str) -> Iterator[str]:
    if profiling.enable_memory_snapshot and device_type != "cuda":
        yield (
            f"profiling.enable_memory_snapshot = true: it records CUDA's memory allocator, and this run is on "
            f"{device_type}; set it to false."
        )
    busy = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and busy > profiling.profile_freq:
        yield (
            f"profiling.profile_freq = {profiling.profile_freq}: less than profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}; set it to at least {busy}."
        )


def _validation(validation: Validation, held_out_fraction: float) -> Iterator[str]:
    if validation.enable and held_out_fraction == 0:
        yield (
            "validation.enable = true: data.held_out_fraction = 0 keeps no documents for it; set "
            "data.held_out_fraction to 0.01, or validation.enable to false."
        )


def _fault_tolerance(config: Config, device_type: str) -> Iterator[str]:
    options = config.fault_tolerance
    if not options.enable:
        return
    if options.group_size < 1:
        yield "fault_tolerance.group_size = 0: set it to the number of replica groups that the run has."
        return
    for key, highest in (("replica_id", options.group_size - 1), ("min_replica_size", options.group_size)):
        if getattr(options, key) > highest:
            yield (
                f"fault_tolerance.{key} = {getattr(options, key)}: at most {highest} with fault_tolerance.group_size "
                f"{options.group_size}."
            )
    if options.process_group == "nccl" and (device_type != "cuda" or config.training.enable_cpu_offload):
        where = "kept in host memory" if device_type == "cuda" else f"on {device_type}"
        yield f'fault_tolerance.process_group = "nccl": gradients are {where}; set it to "gloo".'
    if options.join_timeout_ms <= options.process_group_timeout_ms:
        yield (
            f"fault_tolerance.join_timeout_ms = {options.join_timeout_ms}: a group that waits in vain for "
            f"process_group_timeout_ms would be left behind; set it to more than {options.process_group_timeout_ms}."
        )
    if options.semi_sync_method is not None:
        yield from _rounds(config)


def _rounds(config: Config) -> Iterator[str]:
    options = config.fault_tolerance
    fragments = len(options.module_fqns_per_model_fragment) or options.num_fragments
    round_steps, rest = divmod(options.sync_steps, fragments)
    if rest or not round_steps:
        yield (
            f"fault_tolerance.sync_steps = {options.sync_steps}: not a multiple of the {fragments} fragments, of which "
            f"one is averaged at a time; set it to {either(nearest_multiples(fragments, options.sync_steps))}."
        )
        return
    if options.fragment_sync_delay >= round_steps:
        yield (
            f"fault_tolerance.fragment_sync_delay = {options.fragment_sync_delay}: must be less than the {round_steps} "
            "steps between two averages."
        )
    for key, value in (("training.steps", config.training.steps), ("checkpoint.interval", config.checkpoint.interval)):
        if value % round_steps:
            yield (
                f"{key} = {value}: not a multiple of the {round_steps} steps between two averages, and only then do "
                f"all groups have one state; set it to {either(nearest_multiples(round_steps, value))}."
            )


EXCLUDABLE = ("model", "optimizer", "rng", "data")


def _excluded(checkpoint: Checkpoint) -> Iterator[str]:
    for name in checkpoint.exclude_from_loading:
        if name.split("/")[0] not in EXCLUDABLE:
            yield (
                f'checkpoint.exclude_from_loading = ["{name}"]: a checkpoint has no such part; known: '
                f"{', '.join(EXCLUDABLE)}, and names below the first two such as model/output.weight."
            )


def _folders(config: Config) -> Iterator[str]:
    """A URL would become a folder of that name below the current one."""
    job, checkpoint = config.job, config.checkpoint
    options = {"job.dump_folder": job.dump_folder, "checkpoint.folder": checkpoint.folder}
    for name, value in (options | {"checkpoint.initial_load_path": checkpoint.initial_load_path or ""}).items():
        if "://" in value:
            yield f'{name} = "{value}": object stores are not supported; set it to a folder, for example a mounted one.'


SLURM_TIMES = (r"(?P<m>\d+)(:(?P<s>\d+))?", r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
               r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?")  # fmt: skip
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def _slurm(slurm: Slurm) -> Iterator[str]:
    found = [match for pattern in SLURM_TIMES if slurm.time and (match := re.fullmatch(pattern, slurm.time))]
    seconds = sum(int(number or 0) * SECONDS[unit] for match in found for unit, number in match.groupdict().items())
    if slurm.time and slurm.time != "UNLIMITED" and not seconds:
        yield (
            f'slurm.time = "{slurm.time}": must be as Slurm writes it, for example "90" (minutes), "12:00:00", '
            '"1-12:00:00" or "UNLIMITED".'
        )
    if 0 < seconds <= slurm.signal_seconds:
        yield (
            f"slurm.signal_seconds = {slurm.signal_seconds}: not less than the {seconds} s of slurm.time "
            f'"{slurm.time}"; the run would be told to save as it starts.'
        )
    for name in slurm.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield f'slurm.environment: "{name}" cannot be the name of an environment variable.'
