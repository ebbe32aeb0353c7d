"""Entry point: parses the configuration, refuses what cannot work, trains.

Exit codes: 0 complete or stopped on request, 1 training failed, 2 the configuration or the data cannot be used,
75 stopped on request with steps left, if `preemption.requeue` is set.
"""

import faulthandler
import logging
import os
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from torchtitan_clone import doors
from torchtitan_clone.config import Config, ConfigError, help_text, read_config
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.reader import with_file
from torchtitan_clone.config.started import DEFAULT_CONFIG, reinstall
from torchtitan_clone.network import NoAnswerError
from torchtitan_clone.observe.logging import setup_logging
from torchtitan_clone.observe.outputs import STDERR, guard_outputs, print_error
from torchtitan_clone.run.early import check_without_torch
from torchtitan_clone.run.stopping import (
    REQUEUE_EXIT_CODE,
    StopBeforeTraining,
    StopRequest,
    explain_ended_process,
    importing,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torchtitan_clone.data import Dataset
    from torchtitan_clone.data.mixture_dataset import MixtureDataset
    from torchtitan_clone.parallel.runtime import Launch
    from torchtitan_clone.replicas.protocol import ReplicaGroup
    from torchtitan_clone.run.plan import RunPlan
    from torchtitan_clone.trainer import Trainer

    WrapReplicaGroup = Callable[[ReplicaGroup], ReplicaGroup]

logger = logging.getLogger("torchtitan_clone")

PATH_OPTIONS = (
    "job.config_file", "data.cache_folder", "data.num_workers", "data.prepare_processes", "data.sources",
    "launch.", "slurm.", "training.dataset_path", "model.hf_assets_path", "checkpoint.initial_load_path",
    "distillation.teacher_path", "checkpoint.local_folder", "distillation.store",
)  # fmt: skip
"""Prefixes of the options that name a location, or processes of a machine, which may differ between nodes."""


def main(argv: list[str]) -> int:
    """Runs one process of the run that the arguments describe; returns its exit code."""
    if asked := {"--help", "-h"}.intersection(argv):
        after = argv[argv.index(asked.pop()) + 1 :]
        return _help([word for word in after if not word.startswith("-")])
    if sys.platform != "linux":
        print_error(
            f"{sys.platform} is not supported: processes use interfaces of Linux (/proc, CPU affinity, signals)"
        )
        return 2
    stop = StopRequest()
    stop.install()
    try:
        rank = environment_integer("RANK", default=0)
        setup_logging(rank=rank, color=True)
        loaded = read_config(argv)
        check_without_torch(loaded.config, problems=loaded.problems)
        setup_logging(rank=rank, color=not loaded.config.metrics.disable_color_printing)
        if loaded.config.job.imports:
            _import_modules(loaded.config.job.imports)
        return run(loaded.config, stop=stop, problems=loaded.problems)
    except (ConfigError, NoAnswerError) as error:
        print_error(error)  # the launcher shows local rank 0, and another rank where that one was ended before
        return 2 if isinstance(error, ConfigError) else 1


def _import_modules(names: "Sequence[str]") -> None:
    from torchtitan_clone.config.imports import import_modules

    with importing():
        import_modules(names)


def _help(words: list[str]) -> int:
    try:
        sys.stdout.write(help_text(words))
    except ConfigError as error:
        print_error(error)
        return 2
    return 0


def run(
    config: Config,
    *,
    stop: StopRequest,
    wrap_replica_group: "WrapReplicaGroup | None" = None,
    problems: "Sequence[str]" = (),
) -> int:
    """Trains and returns the exit code; `wrap_replica_group` wraps the replica group that the trainer joins.

    ConfigError with `problems`, which were found in the configuration's files, and with all others.
    """
    try:
        with stop.raising_at_once():
            plan, launch, device = _plan(config, problems=problems)
        if config.job.dry_run or config.comm.mode == "fake_backend":
            with stop.raising_at_once():
                return _describe(plan, device=device)
        return _train(plan, launch=launch, device=device, stop=stop, wrap_replica_group=wrap_replica_group)
    except StopBeforeTraining as stopped:
        logger.info("stopped by %s before the first step", stopped)
        return _exit_code(config, complete=False)


def _plan(config: Config, *, problems: "Sequence[str]") -> "tuple[RunPlan, Launch, torch.device]":
    """Imports torch only here, so that a wrong option is reported at once."""
    with importing():
        from torchtitan_clone.parallel.runtime import Launch, pick_device
        from torchtitan_clone.run import preflight
        from torchtitan_clone.run.describe import simulated_device_type
    launch = Launch.from_environment()
    device = pick_device(launch)
    is_real = not config.job.dry_run and config.comm.mode == "default"
    plan = preflight.resolve(
        config,
        world_size=launch.world_size,
        device_type=device.type if is_real else simulated_device_type(config, present=device.type),
        problems=problems,
        looks_for_data=True,
    )
    return plan, launch, device


def _describe(plan: "RunPlan", *, device: "torch.device") -> int:
    from torchtitan_clone.run import preflight
    from torchtitan_clone.run.describe import DEVICE_TYPES, describe_run, find_planner
    from torchtitan_clone.run.memory import find_memory_errors
    from torchtitan_clone.run.preflight import find_all_notices

    preflight.check_start(plan)
    device_type = plan.device_type
    sys.stdout.write(describe_run(plan, device_type=device_type))
    warnings = [*find_all_notices(plan, device_type=device_type)]
    if plan.config.job.dry_run_device in DEVICE_TYPES and device_type == device.type:
        warnings += (f"not on this machine: {error}" for error in find_memory_errors(plan.at_step(1), device=device))
    for line in warnings:
        logger.warning("%s", line)
    if (planner := find_planner()) is not None:
        sys.stdout.write(planner.describe_time(plan.at_step(1)))
    return 0


def _train(
    plan: "RunPlan",
    *,
    launch: "Launch",
    device: "torch.device",
    stop: StopRequest,
    wrap_replica_group: "WrapReplicaGroup | None",
) -> int:
    """Prepares the run, starts the process group and trains; returns the exit code."""
    with importing():
        from torchtitan_clone.ops import kernels
        from torchtitan_clone.parallel.runtime import process_group
        from torchtitan_clone.run import preflight
        from torchtitan_clone.run.kernel_record import settle_kernels
        from torchtitan_clone.run.replicas import wait_for_peers
        from torchtitan_clone.run.state import TrainingError
        from torchtitan_clone.trainer import Trainer
    with stop.raising_at_once():
        prepared = preflight.prepare(plan, launch=launch)
    if prepared.completed_steps >= plan.config.training.steps:
        _log_completed(plan, completed_steps=prepared.completed_steps)
        return 0
    kernels.prepare(device, compiles_model=plan.config.compile.compiles_model)  # in threads, while the run starts
    with stop.raising_at_once():
        peers_host = wait_for_peers(plan)
    _log_start(plan, device=device)
    try:
        _wait_for_ranks(plan, dataset=prepared.dataset, launch=launch, stop=stop)
    except TimeoutError as error:
        logger.error("%s", error)
        return 1
    with process_group(plan.config.comm, launch=launch, device=device, peers_host=peers_host):
        settle_kernels(plan, rank=launch.rank, device=device, resumes=prepared.completed_steps > 0)
        try:
            trainer = Trainer(prepared, launch=launch, device=device, stop=stop, wrap_replica_group=wrap_replica_group)
            complete = _train_steps(trainer, launch=launch)
        except TrainingError as error:
            logger.error("%s", error)
            return 1
    return _exit_code(plan.config, complete=complete)


def _log_completed(plan: "RunPlan", *, completed_steps: int) -> None:
    from torchtitan_clone.run.describe import describe_extension

    message = "the run in %s is complete: step %d of training.steps = %d; to continue, add %s"
    logger.info(message, plan.folder, completed_steps, plan.config.training.steps, describe_extension(plan.config))


def _log_start(plan: "RunPlan", *, device: "torch.device") -> None:
    """Logs what is trained and with which kernels of attention, and warns of options that work otherwise than meant."""
    from torchtitan_clone.ops.attention import describe_kernels
    from torchtitan_clone.run.describe import one_line_summary
    from torchtitan_clone.run.preflight import find_all_notices

    attention = describe_kernels(device, dtype=plan.config.training.mixed_precision_param)
    for line in filter(None, (plan.config.job.description, one_line_summary(plan), attention)):
        logger.info("%s", line)
    for line in find_all_notices(plan, device_type=device.type):
        logger.warning("%s", line)


def _wait_for_ranks(plan: "RunPlan", *, dataset: "Dataset", launch: "Launch", stop: StopRequest) -> None:
    """Returns once all ranks have started with the same options.

    ConfigError where they differ, TimeoutError after comm.init_timeout_seconds, StopBeforeTraining if a rank was asked
    to stop.
    """
    from torchtitan_clone.parallel.runtime import wait_for_all_ranks

    options = _options_that_must_match(plan, dataset=dataset)
    starts = wait_for_all_ranks(
        plan.config.comm, launch=launch, options=options, is_stop_wanted=lambda: stop.reason is not None
    )
    if not starts:
        raise StopBeforeTraining(stop.reason or "a signal to another rank")


def _train_steps(trainer: "Trainer", *, launch: "Launch") -> bool:
    """Returns whether the run is complete; prints a ConfigError that other ranks than the shown one may find alone."""
    try:
        return trainer.train()
    except ConfigError as error:
        if launch.local_rank != 0:  # found by one rank, as in the rows that it reads
            print_error(error)
        raise


def _options_that_must_match(plan: "RunPlan", *, dataset: "Dataset") -> list[str]:
    """Returns what all ranks must have in common, one option a line; locations may differ, but not what is there."""
    from torchtitan_clone.data.loader import LABELS

    lines = [f"WORLD_SIZE = {plan.world_size}", f"type of the device = {plan.device_type}"]
    # Ranks with it connect to each other in collectives of their own.
    lines.append(f"the package torchtitan_clone.cpu = {'closed' if doors.why_closed('cpu') else 'open'}")
    for table, options in asdict(plan.config).items():
        lines += [f"{table}.{key} = {value}" for key, value in options.items()]
    lines = [line for line in lines if not line.startswith(PATH_OPTIONS)]
    lines += [f"data.sources: {asdict(replace(source, path=None))}" for source in plan.config.data.sources]
    sources = cast("MixtureDataset", dataset).sources if dataset.is_mixture else {"": dataset}
    for name, source in sources.items():
        place = f"data.sources, name {name}: " if plan.config.data.sources else ""
        lines += [f"{place}{LABELS[key]} = {getattr(source.identity, key)}" for key in ("data", "tokenizer", "eos_id")]
    if plan.config.distillation.is_enabled:
        from torchtitan_clone.run.weights_folder import with_digest

        lines.append(f"distillation: {asdict(with_digest(plan.config.distillation))}")
    return lines


def _exit_code(config: Config, *, complete: bool) -> int:
    return REQUEUE_EXIT_CODE if config.preemption.requeue and not complete else 0


def exit_process(argv: list[str]) -> None:
    """Runs main and exits without teardown: gloo's threads sometimes abort a process that tears down in order.

    Without a configuration file it trains with debug_model.toml.
    """
    guard_outputs()
    faulthandler.enable(STDERR)  # prints what runs in each thread if a library aborts
    try:
        code = main(with_file(argv, default=str(DEFAULT_CONFIG)))
    except ModuleNotFoundError as error:
        print_error(f"the package {error.name} is not installed in {sys.executable}; {reinstall()}")
        code = 2
    except Exception as error:
        if reason := explain_ended_process(error, is_alone=environment_integer("WORLD_SIZE", default=1) == 1):
            logger.error("training failed: %s", reason)
        else:
            logger.exception("training failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(sys.argv[1:])
