"""Phases of a run: stretches of steps with the same frozen blocks on the same mesh.

A pure function of the step, so that a run that is resumed anywhere finds itself in the right one.
"""

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
    """All phases in their order, the first without anything frozen; its options fit the world, see run/rules.py."""
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
