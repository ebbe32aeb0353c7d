"""Options of who starts the processes of a run on a cluster: [launch] and [slurm], see schema.py."""

from dataclasses import dataclass, field
from typing import Annotated

from torchtitan_clone.config.schema_training import Degree, Range, Seconds


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a run requests from Slurm, Kubernetes or SkyPilot; training ignores it."""

    nodes: Annotated[int, Range(1, 10**5)] = 1
    """Number of nodes (of each replica group)."""
    gpus_per_node: Annotated[int, Range(0, 1024)] = 8
    """GPUs per node; 0 trains on CPUs."""
    processes_per_node: Annotated[int, Range(1, 1024)] | None = None
    """Ranks per node; unset: gpus_per_node, or 1 on CPUs."""
    cpus_per_node: Annotated[int, Range(1, 10**5)] | None = None
    """CPU cores per node; unset: under Slurm exclusive nodes, elsewhere no request."""
    accelerator: str = "H100"
    """For SkyPilot: type of the GPUs."""
    time: str | None = None
    """Time limit in Slurm's format, for example "1-12:00:00"; unset: no limit, or that of the partition."""
    grace_seconds: Seconds = 120
    """Time between the signal to save and the end of a node that is taken away, or before the limit, in seconds."""
    max_starts_without_progress: Degree = 3
    """Number of starts without a new checkpoint, under Kubernetes and SkyPilot of failures, after which a run ends."""
    setup: list[str] = field(default_factory=list[str])
    """Shell commands that run first on each node, under Slurm on the first, for example ["module load cuda"]."""
    environment: dict[str, object] = field(default_factory=dict[str, object])
    """Environment variables of the job, as strings; under Slurm PYTHON is the interpreter inside the container."""
    image: str = ""
    """Container image that has the command torchtitan_clone: of Kubernetes, and of SkyPilot if it is set."""
    volumes: dict[str, str] = field(default_factory=dict[str, str])
    """Volumes by the path where they are mounted: persistent volume claims of Kubernetes, or volumes of SkyPilot."""
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables from secrets of Kubernetes, as {HF_TOKEN = "SECRET/KEY"}; SkyPilot asks for the values."""
    shared_memory_gib: Annotated[int, Range(1, 2**20)] = 16
    """Size of /dev/shm under Kubernetes, which counts as memory of the container."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What scripts/slurm/submit.py requests from Slurm alone, beyond [launch]."""

    partition: str | None = None
    """Slurm partition; unset: the default partition."""
    account: str | None = None
    """Slurm account; unset: the user's default account."""
    sbatch_options: list[str] = field(default_factory=list[str])
    """Additional sbatch options, for example ["--constraint=h100", "--qos=long"]."""
    container: str = ""
    """Command prefix that starts the container on each node, for example "apptainer exec --nv image.sif"."""
