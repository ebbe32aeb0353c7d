"""Renders a Slurm batch script from the options of a run, and compares what it requests with the cluster."""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.schema import Config, Slurm

OTHER_PARTITIONS = ("-p", "--partition", "-M", "--cluster")
"""Options of sbatch that may select what slurm.partition does not name."""


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
    escaped = str(folder).replace("%", "%%")
    yield f"--output={shlex.quote(f'{escaped}/slurm/{log}')}"


def check_cluster(slurm: Slurm) -> None:
    """Raises ConfigError if Slurm has fewer nodes than requested: by default it queues such a job for ever."""
    present = 0 if any(option.startswith(OTHER_PARTITIONS) for option in slurm.sbatch_options) else count_nodes(slurm)
    if 0 < present < slurm.nodes:
        where = f"the partition {shown(slurm.partition)}" if slurm.partition else "the default partition"
        raise ConfigError(
            f"slurm.nodes = {slurm.nodes}: {where} has {present} nodes, so the job would never start; decrease it, "
            "or set slurm.partition to a larger one of `sinfo`"
        )


def count_nodes(slurm: Slurm) -> int:
    """Returns the number of nodes in the largest partition that the job may use; 0 if Slurm does not tell."""
    command = ["sinfo", "--noheader", "--format=%P %D"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):  # sbatch reports what is wrong with Slurm
        return 0
    nodes: dict[str, int] = {}  # a partition has one line per state of its nodes
    for name, _, count in (line.strip().partition(" ") for line in output.splitlines()):
        if count.strip().isdecimal():  # sinfo abbreviates many thousands
            nodes[name] = nodes.get(name, 0) + int(count)
    named = (slurm.partition or "").split(",")
    chosen = [name for name in nodes if (name.rstrip("*") in named if slurm.partition else name.endswith("*"))]
    return max((nodes[name] for name in chosen), default=0)
