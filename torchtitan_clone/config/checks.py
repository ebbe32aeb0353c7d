"""Rules of a configuration's tables; rules that relate the mesh, the model and the data are in run/rules.py."""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, cast, get_args, get_origin, get_type_hints

from torchtitan_clone.config.messages import either, nearest_multiples, no_such, shown
from torchtitan_clone.config.resolved import EXPORT_FOLDER, run_name
from torchtitan_clone.config.schema import (
    Checkpoint,
    Cluster,
    Config,
    FaultTolerance,
    Metrics,
    Parallelism,
    Profiling,
    Slurm,
)
from torchtitan_clone.config.schema_training import Distillation, LRScheduler, Model, Optimizer, OptimizerGroup, Range
from torchtitan_clone.config.stages import find_data_errors
from torchtitan_clone.config.urls import find_tier_errors, find_url_errors, store_url
from torchtitan_clone.documents import is_plain_name


def find_config_errors(config: Config, *, device_type: str) -> list[str]:
    """Returns one message per violated rule."""
    return [*find_table_errors(config), *find_device_errors(config, device_type=device_type)]


def find_table_errors(config: Config) -> list[str]:
    """Returns one message per rule that is violated on every device."""
    return [
        *find_range_errors(config, at=""),
        *_find_import_errors(config.job.imports),
        *_find_empty_paths(config),
        *_find_training_errors(config),
        *_find_vocabulary_errors(config.checkpoint),
        *_find_rewind_errors(config),
        *_find_metrics_errors(config.metrics),
        *_find_profiling_errors(config.profiling),
        *_find_replica_group_errors(config),
        *_find_evaluation_errors(config),
        *_find_average_errors(config),
        *_find_distillation_errors(config),
        *_find_storage_errors(config),
        *_find_async_tensor_errors(config),
        *_find_launch_errors(config.launch, slurm=config.slurm),
        *find_data_errors(config.data, training=config.training),
    ]


def _find_vocabulary_errors(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.resize_vocabulary and not checkpoint.initial_load_in_hf:
        rule = "only a Hugging Face folder is read with another vocabulary"
        yield f"checkpoint.resize_vocabulary = true: {rule}; set checkpoint.initial_load_in_hf, or it to false."


def find_device_errors(config: Config, *, device_type: str) -> Iterator[str]:
    """Yields one message per option that this type of device does not support."""
    options = config.fault_tolerance
    if config.parallelism.enable_async_tensor_parallel and device_type != "cuda":
        rule = f"requires CUDA, and this run is on {device_type}"
        yield f"parallelism.enable_async_tensor_parallel = true: {rule}; set it to false."
    if config.profiling.enable_memory_snapshot and device_type != "cuda":
        rule = f"memory snapshots require CUDA, and this run is on {device_type}"
        yield f"profiling.enable_memory_snapshot = true: {rule}; set it to false."
    has_host_gradients = device_type != "cuda" or config.training.enable_cpu_offload
    if options.enable and options.group_size >= 1 and options.process_group == "nccl" and has_host_gradients:
        where = "offloaded to host memory" if device_type == "cuda" else f"on {device_type}"
        yield f'fault_tolerance.process_group = "nccl": gradients are {where}; set it to "gloo".'


@cache
def ranges_of(table: type) -> dict[str, Range]:
    """Returns the range of each number of a dataclass by the name of its field."""
    found: dict[str, Range] = {}
    for key, annotation in get_type_hints(table, include_extras=True).items():
        for choice in (annotation, *get_args(annotation)):  # the latter of `... | None`
            if get_origin(choice) is Annotated:
                found[key] = cast("Range", get_args(choice)[1])
    return found


def find_range_errors(table: object, *, at: str, colon: str = ":") -> Iterator[str]:
    """Yields one message per number of a dataclass named `at`, and of those in it, that is outside its range."""
    ranges = ranges_of(type(table))
    for key, value in cast("dict[str, object]", vars(table)).items():
        if key in ranges and isinstance(value, int | float) and not ranges[key].holds(value):
            yield f"{at}{key} = {shown(value)}{colon} must be {ranges[key].describe()}."
        elif is_dataclass(value):
            yield from find_range_errors(value, at=f"{at}{key}.")
        elif isinstance(value, list):
            for entry in (entry for entry in cast("list[object]", value) if is_dataclass(entry)):
                first = fields(entry)[0].name
                yield from find_range_errors(entry, at=f"{at}{key}, {first} {shown(getattr(entry, first))}: ", colon="")


def _find_empty_paths(config: Config) -> Iterator[str]:
    names = ("job.dump_folder", "model.hf_assets_path", "data.cache_folder", "checkpoint.initial_load_path")
    for name in (*names, "distillation.teacher_path", "distillation.store"):
        if attrgetter(name)(config) == "":
            yield describe_empty_path(name)


def describe_empty_path(name: str) -> str:
    """Returns the message for an option that is an empty path."""
    return f'{name} = "": an empty path is the current folder; set it to "." for that, or to another path.'


def _find_training_errors(config: Config) -> Iterator[str]:
    if config.job.dry_run_device != "auto" and not config.job.dry_run:
        yield f"--device={config.job.dry_run_device}: is for --dry-run; add --dry-run, or leave it out."
    if config.training.dtype == "bfloat16" and config.training.mixed_precision_param == "float32":
        rule = 'more precise than the master weights, training.dtype = "bfloat16"'
        remedy = 'set training.mixed_precision_param to "bfloat16" or training.dtype to "float32"'
        yield f'training.mixed_precision_param = "float32": {rule}; {remedy}.'
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not re.fullmatch(r"[1-9][0-9]{0,8}", option):
        rule = 'must be "op", or a positive integer n that recomputes every n-th block, for example "2".'
        yield f"activation_checkpoint.selective_ac_option = {shown(option)}: {rule}"
    if config.compile.enable and not config.compile.components:
        rule = "compile.enable is true but no component is selected"
        yield f"compile.components = []: {rule}; add model or loss, or set compile.enable to false."
    if config.data.packing == "best_fit" and not config.training.document_masking:
        rule = "documents that are packed together must not see one another, nor the padding"
        yield f'data.packing = "best_fit": {rule}; set training.document_masking to true, or packing to "concatenate".'
    if config.validation.enable and config.data.held_out_fraction == 0:
        rule = "data.held_out_fraction = 0 holds out no documents"
        yield f"validation.enable = true: {rule}; set data.held_out_fraction to 0.01, or validation.enable to false."


def _find_evaluation_errors(config: Config) -> Iterator[str]:
    if config.validation.prompts and not config.validation.enable:
        yield "validation.prompts: samples are logged at validations; set validation.enable to true, or remove them."
    if config.evaluation.enable and not config.evaluation.tasks:
        yield "evaluation.enable = true: evaluation.tasks is empty; add a task, or set evaluation.enable to false."
    names = [task.name for task in config.evaluation.tasks]
    for name in sorted({name for name in names if names.count(name) > 1 or not is_plain_name(name)}):
        rule = "must be printable, without a slash, and differ from those of other tasks"
        yield f"evaluation.tasks, name {shown(name)}: {rule}; rename it."


def _find_average_errors(config: Config) -> Iterator[str]:
    options, groups = config.ema, config.fault_tolerance
    set_options = {"half_life": options.half_life, "validate": options.validate, "export": options.export}
    for name in (name for name, value in set_options.items() if value and not options.enable):
        rule = "no average is kept with ema.enable = false"
        yield f"ema.{name} = {shown(set_options[name])}: {rule}; set ema.enable to true, or leave {name} out."
    if options.validate and not (config.validation.enable or config.evaluation.enable):
        yield "ema.validate = true: validation.enable and evaluation.enable are false; set one of them to true."
    if options.export and not (config.checkpoint.last_save_in_hf or config.checkpoint.hf_export_interval):
        remedy = "set checkpoint.last_save_in_hf or hf_export_interval, or ema.export to false"
        yield f"ema.export = true: nothing is exported; {remedy}."
    if options.enable and groups.enable and groups.semi_sync_method is not None:
        rule = "with fault_tolerance.semi_sync_method every replica group would average weights of its own"
        yield f"ema.enable = true: {rule}; leave one of the two out."


def _find_distillation_errors(config: Config) -> Iterator[str]:
    options = config.distillation
    if not options.is_enabled:
        set_options = {"alpha": options.alpha, "temperature": options.temperature}
        for name, value in set_options.items():
            if value != getattr(Distillation(), name):
                rule = "there is no teacher; set distillation.teacher_path or distillation.store"
                yield f"distillation.{name} = {value:g}: {rule}, or leave {name} out."
        return
    name = "teacher_path" if options.store is None else "store"
    option = f"distillation.{name} = {shown(getattr(options, name))}"
    if options.store is not None and options.teacher_path is not None:
        yield f"{option}: distillation.teacher_path is set too; leave one of the two out."
    if config.training.z_loss:
        rule = f"training.z_loss is {config.training.z_loss:g}, and the objective has one of the two"
        yield f"{option}: {rule}; set it to 0, or train without a teacher."
    if config.compile.cuda_graph:
        yield f"{option}: compile.cuda_graph records no teacher; set it to false, or train without a teacher."


def _find_async_tensor_errors(config: Config) -> Iterator[str]:
    if not config.parallelism.enable_async_tensor_parallel:
        return
    option = "parallelism.enable_async_tensor_parallel = true"
    if not config.compile.compiles_model:
        remedy = "set compile.enable to true and add model to compile.components, or set it to false"
        yield f"{option}: requires the compiled model; {remedy}."
    if config.parallelism.tensor_parallel_degree == 1:
        yield f"{option}: parallelism.tensor_parallel_degree is 1; increase the degree, or set it to false."


def _find_rewind_errors(config: Config) -> Iterator[str]:
    checkpoint, option = config.checkpoint, 'training.on_spike = "rewind"'
    if config.training.on_spike != "rewind":
        return
    if not checkpoint.enable or checkpoint.load_only:
        off = "checkpoint.load_only = true" if checkpoint.enable else "checkpoint.enable = false"
        yield f'{option}: nothing is saved with {off}, so there is no step to go back to; change it, or set "skip".'
    if checkpoint.keep_latest_k == 1:
        rule = f"{option} goes back to a checkpoint that is older than the step before the spikes"
        yield f"checkpoint.keep_latest_k = 1: {rule}; set it to at least 2, or to 0."
    if config.training.spike_patience == 1:
        yield f"training.spike_patience = 1: with {option} single spikes are skipped; set it to at least 2."
    if config.fault_tolerance.enable and config.fault_tolerance.semi_sync_method is not None:
        rule = "within a round each replica group has spikes of its own, and they could not go back together"
        yield f'{option}: with fault_tolerance.semi_sync_method {rule}; set it to "skip".'


def _find_metrics_errors(metrics: Metrics) -> Iterator[str]:
    if min(metrics.log_freq, metrics.statistics_freq) > 0 and metrics.statistics_freq % metrics.log_freq:
        rule = f"not a multiple of metrics.log_freq {metrics.log_freq}, so that some statistics would have no row"
        remedy = f"set it to {either(nearest_multiples(metrics.log_freq, metrics.statistics_freq))}"
        yield f"metrics.statistics_freq = {metrics.statistics_freq}: {rule}; {remedy}."


def _find_profiling_errors(profiling: Profiling) -> Iterator[str]:
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and needed > profiling.profile_freq:
        rule = f"less than profiler_warmup {profiling.profiler_warmup} + profiler_active {profiling.profiler_active}"
        yield f"profiling.profile_freq = {profiling.profile_freq}: {rule}; set it to at least {needed}."


def _find_replica_group_errors(config: Config) -> Iterator[str]:
    options = config.fault_tolerance
    if not options.enable:
        return
    if options.group_size < 1:
        rule = "must be at least 1 with fault_tolerance.enable; set it to the number of replica groups"
        yield f"fault_tolerance.group_size = 0: {rule}."
        return
    for key, highest in (("replica_id", options.group_size - 1), ("min_replica_size", options.group_size)):
        if (value := getattr(options, key)) > highest:
            rule = f"must be at most {highest} with fault_tolerance.group_size {options.group_size}"
            yield f"fault_tolerance.{key} = {value}: {rule}."
    if options.join_timeout_ms <= options.process_group_timeout_ms:
        rule = "the lighthouse would drop a replica group that waits for process_group_timeout_ms"
        remedy = f"set it to more than {options.process_group_timeout_ms}"
        yield f"fault_tolerance.join_timeout_ms = {options.join_timeout_ms}: {rule}; {remedy}."
    if store_url(config.checkpoint) is not None:
        rule = "replica groups share the folder of checkpoints, and each would upload to the store"
        yield f"checkpoint.folder: {rule}; set a local or mounted folder, or fault_tolerance.enable to false."
    if (threshold := config.optimizer.qk_clip) is not None:
        rule = "the largest logits of a step are those of one replica group"
        yield f"optimizer.qk_clip = {threshold:g}: {rule}; set fault_tolerance.enable to false, or remove it."
    checkpoint = config.checkpoint
    if (step := checkpoint.load_step) != -1 and checkpoint.enable and not checkpoint.load_only:
        rule = "a replica group that starts again would move aside what the others have saved since"
        remedy = "move newer steps out of the folder of checkpoints, and set it to -1"
        yield f"checkpoint.load_step = {step}: {rule}; {remedy}."
    if options.semi_sync_method is not None:
        yield from _find_semi_sync_errors(config, options)


def _find_semi_sync_errors(config: Config, options: FaultTolerance) -> Iterator[str]:
    fragments = max(1, len(options.module_fqns_per_model_fragment) or options.num_fragments)
    round_steps, rest = divmod(options.sync_steps, fragments)
    if rest or not round_steps:
        remedy = f"set it to {either(nearest_multiples(fragments, options.sync_steps))}"
        rule = f"not a multiple of the number of fragments {fragments}"
        yield f"fault_tolerance.sync_steps = {options.sync_steps}: {rule}; {remedy}."
        return
    if options.fragment_sync_delay >= round_steps:
        rule = f"must be less than the interval between two averages, {round_steps} steps"
        remedy = f"set it to at most {round_steps - 1}"
        yield f"fault_tolerance.fragment_sync_delay = {options.fragment_sync_delay}: {rule}; {remedy}."
    checkpoint = config.checkpoint
    saves = checkpoint.enable and not checkpoint.load_only
    intervals = {
        "training.steps": config.training.steps,
        "checkpoint.interval": checkpoint.interval,
        "checkpoint.keep_every": checkpoint.keep_every,
        "checkpoint.hf_export_interval": checkpoint.hf_export_interval,
    }
    others = {
        "interval_minutes": checkpoint.interval_minutes is not None,
        "enable_first_step_checkpoint": checkpoint.enable_first_step_checkpoint,
    }
    for name in (name for name, is_set in others.items() if is_set and saves and round_steps > 1):
        rule = "saves a step between two averages, when replica groups hold other weights"
        yield f"checkpoint.{name}: {rule}; remove it, and set checkpoint.interval."
    for name, steps in intervals.items():
        if steps % round_steps and (saves or not name.startswith("checkpoint.")):
            rule = f"not a multiple of the {round_steps} steps between two averages"
            remedy = f"set it to {either(nearest_multiples(round_steps, steps))}"
            yield f"{name} = {steps}: {rule}, after which all replica groups hold equal weights; {remedy}."


EXCLUDABLE = ("model", "optimizer", "ema", "rng", "data")


MAX_RUN_NAME = 128
OWN_FOLDERS = (EXPORT_FOLDER, "slurm")
"""Folders in a run's folder that no option names: exports, and the logs of Slurm."""


def _find_import_errors(names: Collection[str]) -> Iterator[str]:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
            rule = "must be the name of a module as in an import"
            yield f"job.imports, {shown(name)}: {rule}; that of my_package/parts.py is my_package.parts."


def _find_storage_errors(config: Config) -> Iterator[str]:
    name = run_name(config.job)
    if not is_plain_name(name) or len(name) > MAX_RUN_NAME:
        option = "job.run_name" if config.job.run_name else "the name of the TOML file"
        rule = f"names a folder in job.dump_folder: one path component of at most {MAX_RUN_NAME} printable characters"
        yield f"{option} = {shown(name)}: {rule}; choose another job.run_name."
    for name in config.checkpoint.exclude_from_loading:
        if name.split("/")[0] not in EXCLUDABLE:
            remedy = f"use {', '.join(EXCLUDABLE)}, or a name such as model/output.weight or optimizer/output.weight"
            yield f"checkpoint.exclude_from_loading = [{shown(name)}]: unknown state; {remedy}."
    checkpoint = config.checkpoint
    off = "checkpoint.load_only = true" if checkpoint.enable else "checkpoint.enable = false"
    if checkpoint.create_seed_checkpoint and (checkpoint.load_only or not checkpoint.enable):
        yield f"checkpoint.create_seed_checkpoint = true: nothing is saved with {off}; change one of the two."
    if checkpoint.load_step != -1 and not checkpoint.enable:
        remedy = "set checkpoint.enable and load_only to true to load and not to save, or load_step to -1"
        yield f"checkpoint.load_step = {checkpoint.load_step}: nothing is resumed with {off}; {remedy}."
    yield from find_tier_errors(checkpoint, init_timeout_seconds=config.comm.init_timeout_seconds)
    folders = {
        "job.dump_folder": config.job.dump_folder,
        "checkpoint.folder": config.checkpoint.folder,
        "checkpoint.local_folder": config.checkpoint.local_folder,
        "checkpoint.initial_load_path": config.checkpoint.initial_load_path or "",
        "distillation.teacher_path": config.distillation.teacher_path or "",
        "distillation.store": config.distillation.store or "",
    }
    for name, value in folders.items():
        if name == "checkpoint.folder":
            yield from find_url_errors(name, value)
        elif "://" in value:  # pathlib would create a local folder named like the URL
            rule = "only checkpoint.folder may be in an object store"
            start = f"{value.partition('://')[0]}://..." if "@" in value else value  # it may hold credentials
            yield f"{name} = {shown(start)}: {rule}; set it to a local or mounted folder."
        is_of_run = name in ("checkpoint.folder", "checkpoint.local_folder")
        if is_of_run and os.path.normpath(value).split("/")[0] in OWN_FOLDERS:
            yield f"{name} = {shown(value)}: the run writes other files there; choose another."
        if len(value.splitlines()) > 1:  # would end a line of a batch script
            yield f"{name} = {shown(value)}: must not contain a line break; choose another."


PATHS = (
    "job.dump_folder", "job.run_name", "model.hf_assets_path", "training.dataset_path", "data.cache_folder",
    "distillation.teacher_path", "distillation.store", "parallelism.pipeline_parallel_schedule_csv",
    "checkpoint.folder", "checkpoint.local_folder", "checkpoint.initial_load_path", "metrics.save_tb_folder",
    "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder", "comm.save_traces_folder",
)  # fmt: skip
MAX_PATH, MAX_NAME = 4095, 255


def find_path_errors(config: Config) -> Iterator[str]:
    """Yields one message per path that no file system takes; even asking whether it exists would be an error."""
    for option in PATHS:
        path = os.fsencode(attrgetter(option)(config) or "")
        if len(path) > MAX_PATH or any(len(name) > MAX_NAME for name in path.split(b"/")):
            rule = f"a path has at most {MAX_PATH:,} bytes, and each name in it {MAX_NAME}"
            yield f"{option} = {shown(path.decode(errors='replace'))}: {rule}; shorten it"


SLURM_TIMES = (r"(?P<m>N)(:(?P<s>N))?", r"(?P<h>N):(?P<m>N):(?P<s>N)", r"(?P<d>N)-(?P<h>N)(:(?P<m>N)(:(?P<s>N))?)?")
NUMBER = "[0-9]{1,9}"
_SECRET_WORD = re.compile(
    r".*(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?)|((API|ACCESS|PRIVATE)?KEYS?|PASS)"
)
_ASSIGNMENT = re.compile(r"""([A-Za-z_]\w*)=["']?[^"'\s$`]""")  # not of what the shell computes, such as $(cat FILE)
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(time: str | None) -> int:
    """Returns a time in Slurm's format in seconds; 0 without a limit, or in another format."""
    found = [match for each in SLURM_TIMES if time and (match := re.fullmatch(each.replace("N", NUMBER), time))]
    return sum(int(number or 0) * SECONDS[unit] for match in found for unit, number in match.groupdict().items())


def _find_launch_errors(launch: Cluster, *, slurm: Slurm) -> Iterator[str]:
    seconds = seconds_of(launch.time)
    if launch.time and launch.time != "UNLIMITED" and not seconds:
        remedy = 'for example "90" (minutes), "12:00:00", "1-12:00:00" or "UNLIMITED"'
        yield f"launch.time = {shown(launch.time)}: not in Slurm's format; {remedy}."
    if 0 < seconds <= launch.grace_seconds:
        rule = f'must be less than launch.time "{launch.time}" = {seconds} s'
        yield f"launch.grace_seconds = {launch.grace_seconds}: {rule}; decrease it, or increase launch.time."
    yield from _find_secrets(launch, slurm=slurm)
    for option, names in {"launch.environment": launch.environment, "launch.secrets": launch.secrets}.items():
        for name in (name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)):
            yield f"{option}: {shown(name)} is not a valid name of an environment variable; rename it."
    for name, secret in launch.secrets.items():
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*/[\w.-]+", secret):
            rule = "must be the name of a secret and a key in it, as my-secret/token"
            yield f"launch.secrets.{name}: {rule}, not the secret itself; create the secret in the cluster."
    for path, name in launch.volumes.items():
        if not (path.startswith("/") and re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)):
            rule = "must be an absolute path, and the name of a claim or volume in lower case"
            yield f"launch.volumes: {shown(path)} = {shown(name)}: {rule}; change it."


def _find_secrets(launch: Cluster, *, slurm: Slurm) -> Iterator[str]:
    """The options of a run are written to config.toml, to every checkpoint and to the batch script."""
    commands = {"launch.setup": launch.setup, "slurm.container": [slurm.container]}
    commands["slurm.sbatch_options"] = slurm.sbatch_options
    names = {option: _ASSIGNMENT.findall("\n".join(lines)) for option, lines in commands.items()}
    for option, found in {"launch.environment": list(launch.environment), **names}.items():
        for name in found:
            if any(_SECRET_WORD.fullmatch(word) for word in re.split(r"[\W_]+", name.upper())):
                rule = "looks like a secret, which would be readable in config.toml and in every checkpoint"
                remedy = f"remove it and export {name} before you submit to Slurm, or name it in launch.secrets"
                yield f"{option}: {name} {rule}; {remedy}."


def find_unknown_model(model: Model, *, known: Collection[str]) -> Iterator[str]:
    """Yields a message if there is no such family."""
    if model.name not in known:
        yield no_such("model.name", model.name, what="model", known=known)


def find_unknown_flavor(model: Model, *, family: str, known: Collection[str]) -> Iterator[str]:
    """Yields a message if a family has no such flavor."""
    if model.flavor not in known:
        yield no_such("model.flavor", model.flavor, what=f"flavor of {family}", known=known)


def find_unknown_optimizers(optimizer: Optimizer, *, known: Collection[str]) -> Iterator[str]:
    """Yields one message for each name that is no optimizer."""
    names = {"optimizer.name": optimizer.name}
    names |= {f"{describe_group(group)}: name": group.name for group in optimizer.groups if group.name is not None}
    for option, name in names.items():
        if name not in known:
            yield no_such(option, name, what="optimizer", known=known)


def describe_group(group: OptimizerGroup) -> str:
    """Returns an entry of optimizer.groups as messages name it."""
    return f'optimizer.groups, pattern "{group.pattern}"'


def find_unknown_decay(lr_scheduler: LRScheduler, *, known: Collection[str]) -> Iterator[str]:
    """Yields a message if there is no such decay."""
    if lr_scheduler.decay_type not in known:
        yield no_such("lr_scheduler.decay_type", lr_scheduler.decay_type, what="shape", known=known)


def find_unknown_schedule(parallelism: Parallelism, *, known: Collection[str]) -> Iterator[str]:
    """Yields a message if there is no such pipeline schedule, unless a file takes its place."""
    name = parallelism.pipeline_parallel_schedule
    if name not in known and not parallelism.pipeline_parallel_schedule_csv:
        yield no_such("parallelism.pipeline_parallel_schedule", name, what="schedule", known=known)
