"""Entry: parse the configuration, refuse what cannot work, train.

Exit codes: 0 complete or stopped on request, 1 training failed, 2 the configuration or the data cannot be used,
75 stopped on request where `preemption.requeue` asks for that code.
"""

import logging
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchtitan_clone.config import Config, ConfigError, help_text, load_config
from torchtitan_clone.fault_tolerance.lighthouse import NoLighthouseError, await_lighthouse
from torchtitan_clone.observe.logging import setup_logging
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE, StopBeforeTraining, StopRequest

if TYPE_CHECKING:
    from torchtitan_clone.run.preflight import RunPlan

logger = logging.getLogger("torchtitan_clone")

PLACES = (
    "job.config_file", "data.", "slurm.", "training.dataset_path", "model.hf_assets_path",
    "checkpoint.initial_load_path",
)  # fmt: skip
"""How options begin that say where things are, which may differ from node to node."""


def main(argv: list[str]) -> int:
    """Runs one process of the run that the arguments describe; returns its exit code."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(help_text())
        return 0
    stop = StopRequest()
    stop.install()
    rank = int(os.environ.get("RANK", "0"))
    setup_logging(rank=rank, color=True)
    try:
        config = load_config(argv)
        setup_logging(rank=rank, color=not config.metrics.disable_color_printing)
        return run(config, stop=stop)
    except (ConfigError, NoLighthouseError) as error:
        # Every process finds the same; one of each machine says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1


def run(config: Config, *, stop: StopRequest) -> int:
    """Trains and returns the exit code."""
    try:
        return _train(config, stop=stop)
    except StopBeforeTraining as stopped:
        logger.info("stopped by %s before the first step", stopped)
        return _exit_code(config, complete=False)


def _train(config: Config, *, stop: StopRequest) -> int:
    """torch is imported only now, so that a wrong option is reported at once."""
    with stop.ending_at_once():
        from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group, wait_for_all_ranks
        from torchtitan_clone.run import preflight
        from torchtitan_clone.trainer import Trainer, TrainingError

        launch = Launch.from_environment()
        device = pick_device(launch)
        plan = preflight.resolve(config, world_size=launch.world_size, device_type=device.type)
        if config.job.dry_run or config.comm.mode == "fake_backend":
            _describe(plan)
            return 0
        run = preflight.prepare(plan, launch=launch)
    done = max(run.progress.step, run.finished_step)
    if done >= config.training.steps:
        logger.info(
            "the run in %s is complete: step %d of training.steps = %d; raise training.steps to go on",
            plan.folder,
            done,
            config.training.steps,
        )
        return 0
    options = config.fault_tolerance
    if options.enable:
        with stop.ending_at_once():
            await_lighthouse(os.environ["TORCHFT_LIGHTHOUSE"], seconds=options.process_group_timeout_ms / 1000)
    for line in (config.job.description, plan.overview):
        if line:
            logger.info("%s", line)
    try:
        goes_on = wait_for_all_ranks(
            config.comm, launch=launch, options=_alike(plan), is_stop_wanted=lambda: stop.reason is not None
        )
    except TimeoutError as error:
        logger.error("%s", error)
        return 1
    if not goes_on:
        raise StopBeforeTraining(stop.reason or "a signal to another rank")
    with process_group(config.comm, launch=launch, device=device):
        try:
            complete = Trainer(run, launch=launch, device=device, stop=stop).train()
        except TrainingError as error:
            logger.error("%s", error)
            return 1
    return _exit_code(config, complete=complete)


def _alike(plan: "RunPlan") -> list[str]:
    """What all ranks of a run must have alike, an option in a line; where they find files may differ."""
    lines = [f"WORLD_SIZE = {plan.world_size}"]
    for table, options in asdict(plan.config).items():
        lines += [f"{table}.{key} = {value}" for key, value in options.items()]
    return [line for line in lines if not line.startswith(PLACES)]


def _exit_code(config: Config, *, complete: bool) -> int:
    return REQUEUE_EXIT_CODE if config.preemption.requeue and not complete else 0


def _describe(plan: "RunPlan") -> None:
    from torchtitan_clone.run import preflight

    sys.stdout.write(preflight.summary(plan))
    if plan.world_size > 1:
        from torchtitan_clone.run.simulate import describe_layouts

        sys.stdout.write(describe_layouts(plan))
    if plan.config.comm.mode == "fake_backend":
        from torchtitan_clone.run.simulate import simulate

        sys.stdout.write(f"\n{simulate(plan)}")


def exit_process(argv: list[str]) -> None:
    """Runs main and ends at once: gloo's threads sometimes abort a process that tears down in order."""
    try:
        code = main(argv)
    except Exception:
        logger.exception("training failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(sys.argv[1:])
