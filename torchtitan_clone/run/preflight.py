"""Checks a run before a process group starts or a folder is made.

`resolve` checks what follows from the configuration alone, `check_start` also what this machine and the run's folder
must provide; `prepare` then opens the data. Notices are warnings of options that work, but probably not as intended.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from torchtitan_clone.checkpoint.folder import (
    CONFIG_FILE,
    CorruptCheckpointError,
    committed_steps,
    expected_progress,
    finished_step,
    initial_folder,
    progress_to_resume,
)
from torchtitan_clone.checkpoint.progress import NOTHING_DONE, Progress
from torchtitan_clone.config import Config, ConfigError, load_config
from torchtitan_clone.config.checks import describe_group
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.messages import no_such, shown
from torchtitan_clone.config.reader import flat
from torchtitan_clone.config.resolved import EXPORT_FOLDER
from torchtitan_clone.config.urls import store_url
from torchtitan_clone.data import build_tokenizer, describe_data, open_dataset
from torchtitan_clone.models import find_model
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.moe import MoEModelArgs
from torchtitan_clone.observe.metrics import check_metrics, check_metrics_file, checked_wandb
from torchtitan_clone.ops.kernels import has_bfloat16_units
from torchtitan_clone.optim import find_optimizer_errors, find_schedule_errors
from torchtitan_clone.parallel.runtime import Launch, check_compiler, check_interface, pick_device
from torchtitan_clone.parallel.stages import splits_backward
from torchtitan_clone.replicas.protocol import replica_groups
from torchtitan_clone.run.describe import check_planner
from torchtitan_clone.run.disk import find_disk_notices
from torchtitan_clone.run.folder import LOCK_FILE, RunFolder
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.run.memory import find_memory_errors
from torchtitan_clone.run.pipeline_rules import find_pipeline_schedule_errors
from torchtitan_clone.run.plan import (
    RunPlan,
    build_plan,
    is_export_due,
    later_phases,
    phases,
    plan_after,
    resolved_precision,
    run_identity,
)
from torchtitan_clone.run.prepared import PreparedRun, find_initial_weights, resolved_model
from torchtitan_clone.run.rules import describe_entry, find_run_errors
from torchtitan_clone.run.validation import build_evaluators

if TYPE_CHECKING:
    from torchtitan_clone.data.mixture_dataset import MixtureDataset

SPLITS_BACKWARD_SINCE = "2.13"
"""Version of torch; 2.11 was tried and fails."""


def resolve(
    config: Config, *, world_size: int, device_type: str, problems: Sequence[str] = (), looks_for_data: bool = False
) -> RunPlan:
    """Resolves names and sizes. ConfigError with `problems` and all broken rules.

    With `looks_for_data` also with why the data is not on this machine, which is not searched for an invalid model.
    """
    config = resolved_precision(config, device_type=device_type)
    errors = list(problems)
    try:
        config = resolved_model(config)
    except ConfigError as error:  # without a model nothing else can be checked
        raise ConfigError([*errors, *error.messages]) from None
    spec, model_args, tokenizer = None, None, None
    with _collected(errors):
        tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    with _collected(errors):
        spec = find_model(config.model)
        model_args = spec.resolve_args(config.model)
        errors += (invalid := model_args.violations())
        model_args = None if invalid else model_args
        if model_args is not None and (config.checkpoint.last_save_in_hf or config.checkpoint.hf_export_interval):
            from torchtitan_clone.hub.formats import format_of

            errors += format_of(spec).find_format_errors(model_args)
    if looks_for_data and model_args is not None:
        with _collected(errors):
            describe_data(training=config.training, data=config.data)
    errors += find_run_errors(
        config,
        world_size=world_size,
        args=model_args,
        tokenizer_vocab_size=tokenizer and tokenizer.vocab_size,
        device_type=device_type,
    )
    errors += find_schedule_errors(config.lr_scheduler, config.optimizer.groups)
    with _collected(errors):
        _check_torch(config)
    with _collected(errors):
        check_metrics(config.metrics)
    with _collected(errors):
        check_planner(config)
    if errors or spec is None or model_args is None or tokenizer is None:
        raise ConfigError(errors)
    for phase in phases(config, world_size):
        of_phase: list[str] = []
        with _collected(of_phase):
            of_phase += spec.resolve_args(phase.config.model).violations()
        errors += [f"{describe_entry(phase)}: {message}" for message in of_phase]
    if errors:
        raise ConfigError(errors)
    plan = build_plan(
        config, world_size=world_size, spec=spec, model_args=model_args, tokenizer=tokenizer, device_type=device_type
    )
    errors = find_optimizer_errors(config.optimizer, parameters=plan.parameters)
    if errors := errors or find_qk_clip_errors(plan):
        raise ConfigError(errors)
    if config.fault_tolerance.enable:
        replica_groups().check_parameters(config.fault_tolerance, names=list(plan.parameters))
    return plan


def find_qk_clip_errors(plan: RunPlan) -> list[str]:
    """Returns why weights of this model cannot be clipped; none where logits are only logged."""
    if (threshold := plan.config.optimizer.qk_clip) is None or threshold == math.inf:
        return []
    from torchtitan_clone.models.qk_clip import find_unclippable

    with torch.device("meta"):
        model = plan.spec.build(plan.model_args)
    remedy = "set it to inf, which logs the largest logit only, or remove it"
    return [f"optimizer.qk_clip = {threshold:g}: {reason}; {remedy}." for reason in find_unclippable(model)]


@contextmanager
def _collected(errors: list[str]) -> Iterator[None]:
    """Adds the messages of a ConfigError to `errors`, so that one start names all problems."""
    try:
        yield
    except ConfigError as error:
        errors += error.messages


def _check_torch(config: Config) -> None:
    """ConfigError for what the installed torch cannot do."""
    backend = config.compile.backend
    # Imports the backends; inductor is always there.
    if config.compile.enable and backend != "inductor" and backend not in (known := torch.compiler.list_backends(())):
        raise ConfigError(no_such("compile.backend", backend, what="backend", known=known))
    is_old = torch.__version__ < SPLITS_BACKWARD_SINCE
    if is_old and not any(find_pipeline_schedule_errors(config.parallelism)) and splits_backward(config.parallelism):
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule: torch {torch.__version__} cannot compute the gradients of inputs "
            "and weights separately in a model with custom operators; set it to 1F1B or Interleaved1F1B, or install "
            f"torch {SPLITS_BACKWARD_SINCE}"
        )


def check_start(plan: RunPlan, *, writes: bool = False) -> Progress:
    """Checks what a start needs of this machine, of the run's folder and of an object store, without reading data.

    Returns the progress that the run probably resumes from. With `writes` an object shows that the store can be written
    to. ConfigError.
    """
    config = plan.config
    if config.fault_tolerance.enable:
        replica_groups().check_requirements()
    if config.model.converters:
        from torchtitan_clone.models.float8 import check_torchao

        check_torchao(must_exist=not config.job.dry_run)
    _check_folder_is_writable(plan.folder, option="job.dump_folder")
    if config.checkpoint.enable and not config.checkpoint.load_only:
        option = "checkpoint.folder" if store_url(config.checkpoint) is None else "checkpoint.local_folder"
        _check_folder_is_writable(plan.checkpoint_folder, option=option)
        _check_folder_is_of_no_other_run(plan)
    if config.checkpoint.last_save_in_hf or config.checkpoint.hf_export_interval:
        _check_folder_is_writable(plan.folder / EXPORT_FOLDER, option="job.dump_folder")
    check_metrics_file(plan.output_folder)
    if config.metrics.enable_wandb and environment_integer("RANK", default=0) == 0:
        with checked_wandb():
            pass
    if committed_steps(plan.checkpoint_folder):
        _check_folder_is_ours(plan)
        if config.checkpoint.create_seed_checkpoint:
            raise ConfigError(
                f"checkpoint.create_seed_checkpoint = true: {plan.checkpoint_folder} already has checkpoints; choose "
                "another job.run_name, or set it to false"
            )
    if config.distillation.is_enabled:
        from torchtitan_clone.run.teacher import find_teacher_plan

        find_teacher_plan(plan)  # first: run_identity() reads its files
    progress = _expected_progress(plan, writes=writes)
    if not progress.step:
        find_initial_weights(plan)
    return progress


def prepare(plan: RunPlan, *, launch: Launch) -> PreparedRun:
    """Opens the data and locks the run's folder. ConfigError where data, checkpoints or the folder do not fit the plan.

    Where the run resumes is decided later, by all ranks together; here it is only checked that the newest checkpoint
    was trained on the same data.
    """
    config = plan.config
    check_interface(config.comm)
    progress = check_start(plan, writes=True)
    launch.check_peers()
    check_compiler(config.compile, device_type=pick_device(launch).type)
    if config.model.converters:
        from torchtitan_clone.models.float8 import check_float8_products

        check_float8_products(config.quantize.linear.float8, device=pick_device(launch))
    plans = [each for each in later_phases(plan) if progress.step < max(each.first_step, each.first_batch)]
    plans.insert(0, plan_after(progress, first=plan))
    of_phases = (list(find_memory_errors(each, device=pick_device(launch))) for each in plans)
    if errors := next(filter(None, of_phases), None):
        raise ConfigError(errors)
    dataset = open_dataset(training=config.training, data=config.data, tokenizer=plan.tokenizer, mixture=plan.mixture)
    if dataset.is_mixture:
        cast("MixtureDataset", dataset).check(steps=config.training.steps)
    evaluators = build_evaluators(plan)
    open_loaders(plans[0], dataset=dataset, rank=launch.rank, position=progress.data)
    for phase in plans[1:]:
        open_loaders(phase, dataset=dataset, rank=launch.rank)
    folder = RunFolder(plan) if launch.rank == 0 else None
    if folder is not None:
        folder.lock()
    return PreparedRun(
        plan=plan,
        dataset=dataset,
        initial_weights=None if progress.step else find_initial_weights(plan),
        completed_steps=_completed_steps(plan, progress=progress),
        folder=folder,
        evaluators=evaluators,
    )


def _expected_progress(plan: RunPlan, *, writes: bool) -> Progress:
    checkpoint = plan.config.checkpoint
    progress = expected_progress(checkpoint, folder=plan.checkpoint_folder, identity=run_identity(plan))
    if (url := store_url(checkpoint)) is not None and checkpoint.enable:
        from torchtitan_clone.checkpoint.remote import check_store

        is_writer = not checkpoint.load_only and environment_integer("RANK", default=0) == 0
        stored = check_store(checkpoint, writes=writes and is_writer)
        if stored is not None and checkpoint.create_seed_checkpoint:
            rule = f"{url} already has checkpoints"
            raise ConfigError(
                f"checkpoint.create_seed_checkpoint = true: {rule}; choose another prefix, or set it to false"
            )
        if stored is not None and checkpoint.load_step == -1 and (progress is None or stored.step > progress.step):
            progress = stored
    if progress is None and not checkpoint.initial_load_model_only and (initial := initial_folder(checkpoint)):
        with suppress(CorruptCheckpointError, OSError):  # all ranks verify it together
            progress = progress_to_resume(initial[0], checkpoint=checkpoint)
        if progress is not None and progress.step >= max(1, plan.last_step):
            rule = f"it is of step {progress.step}, and this run ends after step {plan.last_step}"
            remedy = "increase training.steps, or set checkpoint.initial_load_model_only = true"
            raise ConfigError(f"checkpoint.initial_load_path = {initial[0]}: {rule}; {remedy}")
    return progress or NOTHING_DONE


def _completed_steps(plan: RunPlan, *, progress: Progress) -> int:
    """Returns the step up to which the run is complete; 0 where its last step lacks exports, or is not in the store."""
    options = plan.config.checkpoint
    if progress.step >= plan.config.training.steps and (url := store_url(options)) is not None:
        from torchtitan_clone.checkpoint.remote import has_step

        if options.enable and not options.load_only and not has_step(url, step=progress.step):
            return 0
    has_exports = is_export_due(plan.config, step=progress.step) or options.last_save_model_only
    exports = has_exports and not options.load_only and not plan.config.fault_tolerance.enable
    if progress.step == plan.config.training.steps and exports:
        return progress.step if finished_step(plan.checkpoint_folder) == progress.step else 0
    return progress.step


def _check_folder_is_writable(folder: Path, *, option: str) -> None:
    """Creates a file without a name in the folder, or in the parent that it would be made in. ConfigError."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        for name in folder.absolute().parts[len(existing.parts) :]:
            (existing / name).lstat()  # a name that is too long is another error than a missing one
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unwritable(folder, error.strerror, option=option) from None
    try:
        with tempfile.TemporaryFile(dir=existing):  # os.access() is wrong for root, and in /proc
            pass
    except OSError as error:
        raise _unwritable(folder, f"{error.strerror}: {existing}", option=option) from None


def _unwritable(folder: Path, reason: str | None, *, option: str) -> ConfigError:
    remedy = "choose another folder, or make it a folder that this user can write to"
    return ConfigError(f"{option}: nothing can be written to {shown(str(folder))} ({reason}); {remedy}")


def _check_folder_is_of_no_other_run(plan: RunPlan) -> None:
    """Two runs that save into one folder delete each other's checkpoints."""
    own = plan.folder.resolve()
    for parent in plan.checkpoint_folder.resolve().parents:
        if parent != own and not own.is_relative_to(parent) and (parent / LOCK_FILE).exists():
            rule = f"is in the folder of the run {shown(str(parent))}, whose checkpoints would be deleted"
            remedy = "choose another folder, and checkpoint.initial_load_path to start from a checkpoint of that run"
            raise ConfigError(f"checkpoint.folder = {shown(plan.config.checkpoint.folder)}: {rule}; {remedy}")


def _check_folder_is_ours(plan: RunPlan) -> None:
    """A folder with checkpoints belongs to the model and the data it was started with."""
    path = plan.output_folder / CONFIG_FILE
    if not path.exists():
        return
    try:
        before = load_config([f"--job.config_file={path}"])
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}; delete it, or choose another job.run_name") from None
    now = plan.config
    then = flat(asdict(find_model(before.model).resolve_args(before.model)), prefix="model.args.")
    today = flat(asdict(plan.model_args), prefix="model.args.")
    if not now.checkpoint.allow_data_change:
        # Of sources, and of files, which may be elsewhere, the checkpoint's fingerprints are compared.
        has_path = before.training.dataset_path is not None or now.training.dataset_path is not None
        of_source = (*([] if has_path else ["dataset"]), "text_key", "parse_special_tokens", "format", "supervise")
        names = ("seq_len", *(() if now.data.sources else of_source))
        then |= {f"training.{name}": getattr(before.training, name) for name in names}
        today |= {f"training.{name}": getattr(now.training, name) for name in names}
    then["model.name"] = before.model.name
    today["model.name"] = now.model.name
    changes = [f"{key} {then.get(key)} -> {today.get(key)}" for key in today if then.get(key) != today.get(key)]
    if changes:
        raise ConfigError(
            f"the run folder {plan.folder} holds checkpoints of another run: {', '.join(changes)}; "
            "choose another job.run_name, put the values back, or delete the folder"
        )


ADAM_LR = (1e-7, 0.1)
"""Peak learning rates between which Adam trains; published runs are between 1e-5 and 1e-2."""
LARGEST_DECAY = 0.01
LARGEST_BATCH = 10**8
"""In tokens; the largest published batch is DeepSeek V3's, of 63 million."""


def find_all_notices(plan: RunPlan, *, device_type: str) -> Iterator[str]:
    """Yields one sentence for each, at a start and in a dry run."""
    yield from find_notices(plan.config, device_type=device_type)
    yield from find_model_notices(plan.model_args)
    freq = plan.config.comm.replica_check_freq
    if freq and plan.degrees.dp_replicate == plan.degrees.tp == 1:
        yield (
            f"comm.replica_check_freq = {freq}: on this mesh no two ranks hold the same weights, and it compares "
            "buffers and counts of steps only"
        )
    yield from find_disk_notices(plan)
    yield from find_value_notices(plan.config, tokens_per_step=plan.at_step(1).tokens_per_step)


def find_value_notices(config: Config, *, tokens_per_step: int) -> Iterator[str]:
    """Yields one sentence for each value that no published run is near."""
    optimizer = config.optimizer
    rates = {"optimizer.lr": optimizer.lr}
    rates |= {f"{describe_group(group)}: lr": group.lr for group in optimizer.groups if group.lr is not None}
    for option, lr in rates.items():
        if not ADAM_LR[0] <= lr <= ADAM_LR[1]:
            rule = "Adam changes a weight by about the learning rate in a step, and language models are trained with"
            yield f"{option} = {lr:g}: {rule} 1e-5 to 1e-2"
    if (share := optimizer.lr * optimizer.weight_decay) > LARGEST_DECAY and optimizer.lr <= ADAM_LR[1]:
        rule = f"with optimizer.lr = {optimizer.lr:g} each step takes {min(1.0, share):.0%} of every weight"
        yield f"optimizer.weight_decay = {optimizer.weight_decay:g}: {rule}; 0.1 is usual"
    if tokens_per_step > LARGEST_BATCH:
        rule = f"a step has {tokens_per_step:,} tokens, and the largest published batches 63 million"
        yield f"training.local_batch_size = {config.training.local_batch_size}: {rule}; decrease the batch"


def find_notices(config: Config, *, device_type: str) -> Iterator[str]:
    """Yields one sentence for each option that does less than it says."""
    warmup = config.lr_scheduler.warmup_steps
    steps = config.lr_scheduler.total_steps or config.training.steps
    if warmup > steps and not config.lr_scheduler.points:
        yield (
            f"lr_scheduler.warmup_steps = {warmup}: the schedule has {steps} steps, so it is only a warmup, of {steps} "
            "steps; decrease it for a learning rate that decays"
        )
    if config.checkpoint.last_save_model_only and not config.checkpoint.enable:
        yield "checkpoint.last_save_model_only = true: nothing is saved with checkpoint.enable = false"
    if device_type == "cpu" and config.training.mixed_precision_param == "bfloat16" and not has_bfloat16_units():
        yield (
            'training.mixed_precision_param = "bfloat16": this processor has no bfloat16 units, so products '
            'are emulated, up to 100 times slower; set it to "float32", or to "auto"'
        )


def find_model_notices(args: ModelArgs) -> Iterator[str]:
    """Yields one sentence for each argument of the model."""
    moe = args.moe if isinstance(args, MoEModelArgs) else None
    if moe is not None and moe.top_k == 1 and moe.normalize_scores and not moe.auxiliary:
        yield (
            "model.args.moe.top_k = 1: with normalize_scores = true the only score of a token is 1, and the router "
            "is not trained; set normalize_scores to false, a coefficient of an auxiliary loss, or top_k to 2"
        )
