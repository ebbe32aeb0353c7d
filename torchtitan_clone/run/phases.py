"""Phases of a run: consecutive steps with the same frozen layers, mesh, shape of a batch and rotary positions.

A pure function of the step and its global batch, so that a resumed run continues in the right phase.
"""

from dataclasses import dataclass, replace

from torchtitan_clone.config.resolved import resolved_degrees, resolved_global_batch_size
from torchtitan_clone.config.schema import MAX_STEPS, Config, Validation
from torchtitan_clone.config.stages import DataStage, Timeline, resolved_timeline


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase; `config` is that of the run with the values of the phase."""

    first_step: int
    """First step with these frozen layers."""
    frozen_layers: int
    """Number of frozen layers, counted from the first; if above 0, the embedding is frozen too."""
    config: Config
    first_batch: int = 1
    """First global batch of the phase in data.stages."""


def phases(config: Config, world_size: int) -> list[Phase]:
    """Returns all phases that can occur, by their frozen layers and stages; run/rules.py checks their options.

    The batch of a step has its number, that of Timeline.batch_of_step(), or one in between where data.skip_steps has
    ranges that were trained before they were entered.
    """
    _, timeline = rows_and_timeline(config, world_size)
    firsts = [] if timeline is None else [stage.first_batch for stage in timeline.stages]
    starts = sorted({1} | {freeze.step for freeze in config.training.freeze_schedule})
    found: list[Phase] = []
    for start, following in zip(starts, [*starts[1:], MAX_STEPS + 1], strict=True):
        last = start if timeline is None else timeline.batch_of_step(following - 1)
        for batch in [start, *(first for first in firsts if start < first <= last)]:
            phase = phase_of_step(config, world_size, step=start, batch=batch)
            if not found or (phase.config, phase.frozen_layers) != (found[-1].config, found[-1].frozen_layers):
                found.append(phase)
    return found


def rows_and_timeline(config: Config, world_size: int) -> tuple[int, Timeline | None]:
    """Returns the rows of the first global batch and the stages of the data, if any."""
    degrees = resolved_degrees(config.parallelism, world_size)
    rows = resolved_global_batch_size(config.training, degrees, config.fault_tolerance)
    return rows, resolved_timeline(config.data, training=config.training, global_batch_size=rows)


def phase_of_step(config: Config, world_size: int, *, step: int, batch: int | None = None) -> Phase:
    """Returns the phase that a step belongs to; `batch` is its global batch; None: Timeline.batch_of_step()."""
    rows, timeline = rows_and_timeline(config, world_size)
    phase = _frozen_phase(config, step=step, rows=rows)
    if timeline is None:
        return phase
    stage = timeline.phase_stage(batch=batch or timeline.batch_of_step(step))
    phase = replace(phase, first_batch=stage.first_batch)
    if stage.first_batch == 1 and stage.engine_options == timeline.base.engine_options:
        return phase
    return replace(phase, config=_config_of_stage(phase.config, stage))


def _frozen_phase(config: Config, *, step: int, rows: int) -> Phase:
    found = Phase(first_step=1, frozen_layers=0, config=config)
    for freeze in config.training.freeze_schedule:
        if freeze.step > step:
            break
        before = found.config
        stages = before.parallelism.pipeline_parallel_degree
        pipeline = freeze.pipeline_parallel_degree or stages
        shard = before.parallelism.data_parallel_shard_degree
        if shard != -1:
            shard = shard * stages // pipeline
        now = replace(
            before,
            validation=_with_same_rows(before.validation, growth=stages // pipeline),
            training=replace(
                before.training,
                global_batch_size=rows,
                local_batch_size=freeze.local_batch_size or before.training.local_batch_size,
            ),
            parallelism=replace(
                before.parallelism, pipeline_parallel_degree=pipeline, data_parallel_shard_degree=shard
            ),
        )
        found = Phase(first_step=freeze.step, frozen_layers=freeze.layers, config=now)
    return found


def _with_same_rows(validation: Validation, *, growth: int) -> Validation:
    """Returns options that measure the same rows on `growth` times as many data-parallel ranks, or few more."""
    if validation.steps == -1 or growth < 2:
        return validation
    if validation.local_batch_size % growth == 0:
        # A batch has rows of one source: the same rows are batches of the same size.
        return replace(validation, local_batch_size=validation.local_batch_size // growth)
    return replace(validation, steps=-(-validation.steps // growth))


def _config_of_stage(config: Config, stage: DataStage) -> Config:
    """Returns the configuration with the values of a stage; validation keeps the tokens of a micro-batch."""
    training, validation = config.training, config.validation
    rotary = {"rope_theta": stage.rope_theta, "rope_scaling": stage.rope_scaling}
    changed = {key: value for key, value in rotary.items() if value is not None}
    return replace(
        config,
        model=replace(config.model, args=config.model.args | changed),
        training=replace(
            training,
            seq_len=stage.seq_len,
            global_batch_size=stage.global_batch_size,
            local_batch_size=stage.local_batch_size,
        ),
        validation=replace(
            validation, local_batch_size=max(1, validation.local_batch_size * training.seq_len // stage.seq_len)
        ),
    )
