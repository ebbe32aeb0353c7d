"""Renders a Slurm batch script from the options of a run."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from torchtitan_clone.config.schema import Config, Slurm


def processes_per_node(slurm: Slurm) -> int:
    """Returns the number of ranks per node: slurm.processes_per_node, else one per GPU, else one."""
    return slurm.processes_per_node or slurm.gpus_per_node or 1


def batch_script(config: Config, *, folder: Path, repository: Path, python: str, arguments: list[str]) -> str:
    """Returns a script that runs scripts/slurm/job.sh with train.py's `arguments`; paths must be valid on all nodes."""
    slurm = config.slurm
    environment = {
        "PYTHON": python,
        "NO_SETUP": "1",
        "NGPU": str(processes_per_node(slurm)),
        "RUN_FOLDER": str(folder),
        "CHECKPOINTS": str(folder / config.checkpoint.folder),
        "CONTAINER": slurm.container,
        "MAX_STARTS_WITHOUT_PROGRESS": str(slurm.max_starts_without_progress),
        **{name: str(value) for name, value in slurm.environment.items()},
    }
    command = [str(repository / "scripts" / "slurm" / "job.sh"), "--preemption.requeue=true"]
    if config.preemption.deadline_seconds is None:
        command.append(f"--preemption.deadline_seconds={slurm.signal_seconds}")
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in (*_sbatch_options(config, folder=folder), *slurm.sbatch_options)),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        *_setup(slurm.setup),
        f"exec bash {shlex.join([*command, *arguments])}",  # the user's arguments take precedence
    ]
    return "\n".join(lines) + "\n"


def _setup(commands: list[str]) -> list[str]:
    """Returns setup commands; one that fails ends the job without requeueing."""
    failed = 'echo "job $SLURM_JOB_ID: slurm.setup failed, exit code $?: $BASH_COMMAND"; exit 2'
    return ["set -eE", f"trap {shlex.quote(failed)} ERR", *commands, "set +eE; trap - ERR"] if commands else []


def _sbatch_options(config: Config, *, folder: Path) -> Iterator[str]:
    slurm = config.slurm
    yield f"--job-name={shlex.quote(folder.name)}"
    if config.fault_tolerance.enable:  # one array task per replica group
        yield f"--array=0-{config.fault_tolerance.group_size - 1}"
    yield from (f"--nodes={slurm.nodes}", "--ntasks-per-node=1")
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    yield f"--cpus-per-task={slurm.cpus_per_node}" if slurm.cpus_per_node else "--exclusive"
    for name, value in (("time", slurm.time), ("partition", slurm.partition), ("account", slurm.account)):
        if value:
            yield f"--{name}={shlex.quote(value)}"
    # Without the prefix B: Slurm signals the job steps, not the batch shell.
    yield f"--signal=USR1@{slurm.signal_seconds}"
    yield from ("--requeue", "--open-mode=append")
    log = "%A_%a.log" if config.fault_tolerance.enable else "%j.log"  # %j of an array task is not the array's id
    yield f"--output={shlex.quote(f'{folder}/slurm/{log}')}"
