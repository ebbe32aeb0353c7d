"""Renders a Slurm batch script from the options of a run, and compares what it requests with the cluster."""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.resolved import checkpoint_folder
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.schema_cluster import Cluster, Slurm

JOB = Path(__file__).with_name("slurm_job.sh").resolve()
"""Runs in the allocation of a job."""
OTHER_PARTITIONS = ("-p", "--partition", "-M", "--cluster")
"""Options of sbatch that may select what slurm.partition does not name."""


def processes_per_node(launch: Cluster) -> int:
    """Returns the number of ranks per node: launch.processes_per_node, else one per GPU, else one."""
    return launch.processes_per_node or launch.gpus_per_node or 1


def batch_script(config: Config, *, folder: Path, python: str, arguments: list[str]) -> str:
    """Returns a script that runs slurm_job.sh with train.py's `arguments`; paths must be valid on all nodes."""
    launch, slurm = config.launch, config.slurm
    environment = {
        "PYTHON": python,
        "NGPU": str(processes_per_node(launch)),
        "RUN_FOLDER": str(folder),
        "CHECKPOINTS": str(checkpoint_folder(folder, checkpoint=config.checkpoint)),
        "CONTAINER": slurm.container,
        "MAX_STARTS_WITHOUT_PROGRESS": str(launch.max_starts_without_progress),
        **{name: str(value) for name, value in launch.environment.items()},
    }
    command = [str(JOB), "--preemption.requeue=true"]
    if config.preemption.deadline_seconds is None:
        command.append(f"--preemption.deadline_seconds={launch.grace_seconds}")
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in (*_sbatch_options(config, folder=folder), *slurm.sbatch_options)),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        *_setup(launch.setup),
        f"exec bash {shlex.join([*command, *arguments])}",  # the user's arguments take precedence
    ]
    return "\n".join(lines) + "\n"


def _setup(commands: list[str]) -> list[str]:
    """Returns setup commands; one that fails ends the job without requeueing."""
    failed = 'echo "job $SLURM_JOB_ID: launch.setup failed, exit code $?: $BASH_COMMAND"; exit 2'
    return ["set -eE", f"trap {shlex.quote(failed)} ERR", *commands, "set +eE; trap - ERR"] if commands else []


def _sbatch_options(config: Config, *, folder: Path) -> Iterator[str]:
    launch, slurm = config.launch, config.slurm
    yield f"--job-name={shlex.quote(folder.name)}"
    if config.fault_tolerance.enable:  # one array task per replica group
        yield f"--array=0-{config.fault_tolerance.group_size - 1}"
    yield from (f"--nodes={launch.nodes}", "--ntasks-per-node=1")
    if launch.gpus_per_node:
        yield f"--gpus-per-node={launch.gpus_per_node}"
    yield f"--cpus-per-task={launch.cpus_per_node}" if launch.cpus_per_node else "--exclusive"
    for name, value in (("time", launch.time), ("partition", slurm.partition), ("account", slurm.account)):
        if value:
            yield f"--{name}={shlex.quote(value)}"
    # Without the prefix B: Slurm signals the job steps, not the batch shell.
    yield f"--signal=USR1@{launch.grace_seconds}"
    yield from ("--requeue", "--open-mode=append")
    log = "%A_%a.log" if config.fault_tolerance.enable else "%j.log"  # %j of an array task is not the array's id
    escaped = str(folder).replace("%", "%%")
    yield f"--output={shlex.quote(f'{escaped}/slurm/{log}')}"


def check_cluster(config: Config) -> None:
    """Raises ConfigError if Slurm has fewer nodes than requested: by default it queues such a job for ever."""
    nodes, slurm = config.launch.nodes, config.slurm
    present = 0 if any(option.startswith(OTHER_PARTITIONS) for option in slurm.sbatch_options) else count_nodes(slurm)
    if 0 < present < nodes:
        where = f"the partition {shown(slurm.partition)}" if slurm.partition else "the default partition"
        raise ConfigError(
            f"launch.nodes = {nodes}: {where} has {present} nodes, so the job would never start; decrease it, "
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
