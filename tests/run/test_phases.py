"""Phases of a run by step: frozen layers, mesh and batch sizes."""

import pytest

from torchtitan_clone.config import load_config, resolved_degrees, resolved_global_batch_size
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.run.plan import phase_of_step, phases

FREEZE = """--training.freeze_schedule=[
    {step = 3, layers = 1}, {step = 5, layers = 2, pipeline_parallel_degree = 2, local_batch_size = 4},
    {step = 9, layers = 4}
]"""


def test_phases_are_a_function_of_the_step() -> None:
    mesh = ["--parallelism.pipeline_parallel_degree=4", "--parallelism.data_parallel_shard_degree=2"]
    config = load_config([*mesh, FREEZE])
    found = [phase_of_step(config, 8, step=step) for step in range(1, 11)]
    assert [phase.frozen_layers for phase in found] == [0, 0, 1, 1, 2, 2, 2, 2, 4, 4]
    assert [phase.config.training.local_batch_size for phase in found] == [8] * 4 + [4] * 6
    for phase in found:
        degrees = resolved_degrees(phase.config.parallelism, 8)
        assert (degrees.pp, degrees.dp_shard) == ((4, 2) if phase.first_step < 5 else (2, 4))
        assert resolved_global_batch_size(phase.config.training, degrees, FaultTolerance()) == 16


@pytest.mark.parametrize(
    ("steps", "rows", "expected"), [(6, 8, (6, 4)), (3, 8, (3, 4)), (3, 5, (2, 5)), (-1, 8, (-1, 8)), (1, 1, (1, 1))]
)
def test_validation_measures_as_many_rows_on_more_data_parallel_ranks(steps, rows, expected) -> None:
    argv = [f"--validation.steps={steps}", f"--validation.local_batch_size={rows}", FREEZE]
    config = load_config(["--parallelism.pipeline_parallel_degree=4", *argv])
    found = [phase_of_step(config, 8, step=step).config.validation for step in (1, 4, 5, 9)]
    assert [(each.steps, each.local_batch_size) for each in found] == [(steps, rows)] * 2 + [expected] * 2


def test_phases_are_all_combinations_that_can_occur() -> None:
    stages = "--data.stages=[{first_step = 4, seq_len = 1024}, {first_step = 8, seq_len = 256}]"
    skipped = "--data.skip_steps=[[2, 3]]"
    found = [
        [(phase.first_step, phase.first_batch) for phase in phases(load_config([*argv, FREEZE, stages]), 8)]
        for argv in ([], [skipped])
    ]
    assert found[0] == [(1, 1), (3, 1), (3, 4), (5, 4), (5, 8), (9, 8)]
    # Step 2 has batch 4, or 2 if it was trained before the range was entered.
    assert found[1] == [(1, 1), (1, 4), *found[0][1:]]


def test_a_phase_that_returns_to_the_first_values_has_their_batch() -> None:
    """training.global_batch_size is -1 there, which means one micro-batch of each rank."""
    stages = "--data.stages=[{first_step = 4, seq_len = 1024}, {first_step = 8, seq_len = 512}]"
    config = load_config([stages, "--training.seq_len=512"])
    found = [phase_of_step(config, 2, step=step).config.training for step in (4, 8)]
    assert [(training.seq_len, training.global_batch_size) for training in found] == [(1024, 8), (512, 16)]
