"""Resolves options whose value depends on other options: -1, or unset."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_clone.config.messages import either, nearest_divisors, nearest_multiples
from torchtitan_clone.config.schema import Checkpoint, Config, FaultTolerance, Job, Parallelism
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.config.urls import local_path

EXPORT_FOLDER = "hf"
"""Folder of exports in a run's folder."""
HUB_DATASETS = {"c4": "allenai/c4:en"}
"""Short names of datasets on the Hugging Face hub, as "org/name:configuration"."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Number of ranks on each axis of the device mesh; the product of all but `ep` is the world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1
    """Ranks that hold different experts: neighbours on the axes dp_shard, cp and tp."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


def resolved_degrees(parallelism: Parallelism, world_size: int) -> Degrees:
    """Returns the degrees with -1 resolved; run/rules.py rejects degrees that do not fit the world size."""
    degrees = Degrees(
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
    )
    if degrees.dp_shard == -1:
        degrees = replace(degrees, dp_shard=world_size // -degrees.world_size)
    assert degrees.world_size == world_size, f"{degrees} do not multiply to {world_size}"
    return degrees


_AXES = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
    "context": "context_parallel_degree",
}


def find_mesh_errors(parallelism: Parallelism, world_size: int) -> Iterator[str]:
    """Yields a message unless the product of the degrees is the world size, or divides it with a shard degree of -1."""
    degrees = {axis: getattr(parallelism, option) for axis, option in _AXES.items()}
    fixed = {axis: degree for axis, degree in degrees.items() if degree > 1} or {"shard": 1}
    product = math.prod(fixed.values())
    rest_is_sharded = degrees["shard"] == -1
    if world_size == product or (rest_is_sharded and world_size % product == 0):
        return
    remedies: list[str] = []
    for axis, degree in fixed.items():
        rest, remainder = divmod(world_size, product // degree)
        if remainder == 0:
            values = nearest_divisors(rest, degree) if rest_is_sharded else [rest]
            remedies.append(f"parallelism.{_AXES[axis]} to {either(values)}{' or -1' if axis == 'shard' else ''}")
    factors = " x ".join(f"{axis} {degree}" for axis, degree in fixed.items())
    total = f" = {product}" if len(fixed) > 1 else ""
    verb = "does not divide" if rest_is_sharded else "is not"
    setting = f"set {' or '.join(remedies)}, or " if remedies else ""
    ranks = either(nearest_multiples(product, world_size) if rest_is_sharded else [product])
    yield f"parallelism: {factors}{total} {verb} WORLD_SIZE {world_size}; {setting}launch {ranks} ranks."


def resolved_global_batch_size(training: Training, degrees: Degrees, fault_tolerance: FaultTolerance) -> int:
    """Returns the global batch size over all ranks of all replica groups, in sequences."""
    if training.global_batch_size == -1:
        return training.local_batch_size * degrees.data * (fault_tolerance.group_size if fault_tolerance.enable else 1)
    return training.global_batch_size


def run_folder(job: Job) -> Path:
    """Returns the folder that a run writes to."""
    return Path(job.dump_folder) / run_name(job)


def checkpoint_folder(run: Path, *, checkpoint: Checkpoint) -> Path:
    """Returns where a run of this folder commits its steps; with an object store, its local folder."""
    path = local_path(checkpoint.folder)
    return run / (checkpoint.local_folder if path is None else path)


def run_name(job: Job) -> str:
    """Returns the name of the run's folder: job.run_name, else the TOML file's name without suffix, else "run"."""
    return job.run_name or (Path(job.config_file).stem if job.config_file else "run")


def hub_id(training: Training) -> str | None:
    """Returns the hub dataset that the options name; None if they name local files."""
    name = HUB_DATASETS.get(training.dataset, training.dataset)
    return name if training.dataset_path is None and "/" in name else None


def output_folder(config: Config) -> Path:
    """Folder of what this replica group writes by itself; the checkpoint folder is shared by all groups."""
    options, folder = config.fault_tolerance, run_folder(config.job)
    return folder / f"replica-{options.replica_id}" if options.enable else folder
