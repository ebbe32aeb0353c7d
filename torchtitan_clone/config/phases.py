"""Phases of a run: stretches of steps with the same frozen blocks on the same mesh.

A pure function of the step, so that a run that is resumed anywhere finds itself in the right one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtitan_clone.config.resolved import resolved_degrees, resolved_global_batch_size
from torchtitan_clone.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One of them: `config` is the run's with the degrees and the batch size that hold in it."""

    first_step: int
    frozen_layers: int
    """Blocks that do not learn, counted from the first; 0: all learn, and so does the embedding."""
    config: Config


def phases(config: Config, world_size: int) -> list[Phase]:
    """All phases in their order, the first without anything frozen; its options fit the world, see violations()."""
    degrees = resolved_degrees(config.parallelism, world_size)
    rows = resolved_global_batch_size(config.training, degrees, config.fault_tolerance)
    found = [Phase(first_step=1, frozen_layers=0, config=config)]
    for freeze in config.training.freeze_schedule:
        before = found[-1].config
        pipeline = freeze.pipeline_parallel_degree or before.parallelism.pipeline_parallel_degree
        shard = before.parallelism.data_parallel_shard_degree
        if shard != -1:
            shard = shard * before.parallelism.pipeline_parallel_degree // pipeline
        now = replace(
            before,
            training=replace(
                before.training,
                global_batch_size=rows,
                local_batch_size=freeze.local_batch_size or before.training.local_batch_size,
            ),
            parallelism=replace(
                before.parallelism, pipeline_parallel_degree=pipeline, data_parallel_shard_degree=shard
            ),
        )
        found.append(Phase(first_step=freeze.step, frozen_layers=freeze.layers, config=now))
    return found


def phase_of_step(config: Config, world_size: int, *, step: int) -> Phase:
    """The phase that a step belongs to."""
    return [phase for phase in phases(config, world_size) if phase.first_step <= step][-1]


def freeze_violations(config: Config, *, n_layers: int, tied_embeddings: bool) -> Iterator[str]:
    """What is wrong with training.freeze_schedule by itself; each phase has to obey all other rules too."""
    step, layers, degree = 0, 0, config.parallelism.pipeline_parallel_degree
    for freeze in config.training.freeze_schedule:
        point = f"training.freeze_schedule, step {freeze.step}"
        if freeze.step <= step:
            yield f"{point}: must be above {step}; put the steps in rising order, from 1 on."
        if not layers < freeze.layers < n_layers:
            yield (
                f"{point}: layers = {freeze.layers} must be above {layers} and below model.args.n_layers {n_layers}; "
                "each point freezes more blocks, and the last block always learns."
            )
        if (wanted := freeze.pipeline_parallel_degree) is not None:
            if wanted < 1 or degree % wanted:
                yield (
                    f"{point}: pipeline_parallel_degree = {wanted} does not divide the degree before, {degree}; a "
                    "pipeline can shrink to a divisor, for example 1."
                )
                return
            degree = wanted
        if freeze.local_batch_size is not None and freeze.local_batch_size < 1:
            yield f"{point}: local_batch_size = {freeze.local_batch_size} must be at least 1."
        step, layers = freeze.step, freeze.layers
    if config.training.freeze_schedule and config.fault_tolerance.enable:
        yield (
            "training.freeze_schedule: a replica group that heals takes over tensors of the others, which may have "
            "another mesh by then; leave it out, or set fault_tolerance.enable to false."
        )
    if config.training.freeze_schedule and tied_embeddings:
        yield (
            "training.freeze_schedule: freezes the embedding, which is the output's weight too, and that has to learn; "
            "set model.args.tied_embeddings to false."
        )
