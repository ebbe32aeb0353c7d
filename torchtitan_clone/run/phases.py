"""Phases of a run: consecutive steps with the same frozen layers and the same mesh.

A pure function of the step, so that a resumed run continues in the right phase.
"""

from dataclasses import dataclass, replace

from torchtitan_clone.config.resolved import resolved_degrees, resolved_global_batch_size
from torchtitan_clone.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase; `config` is that of the run with the degrees and the batch size of the phase."""

    first_step: int
    frozen_layers: int
    """Number of frozen layers, counted from the first; if above 0, the embedding is frozen too."""
    config: Config


def phases(config: Config, world_size: int) -> list[Phase]:
    """Returns all phases in order, the first with nothing frozen; run/rules.py checks their options."""
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
    """Returns the phase that a step belongs to."""
    return [phase for phase in phases(config, world_size) if phase.first_step <= step][-1]
