"""How layers are spread over pipeline stages."""

import pytest

from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.parallel.stages import layers_of_stages, read_schedule_file, resolved_stages


def layers(frozen_layers=0, **options):
    """Returns the number of layers of each stage of ten layers, and the rank of each stage."""
    parallelism = Parallelism(pipeline_parallel_degree=4, **options)
    stages = resolved_stages(parallelism, n_layers=10, frozen_layers=frozen_layers)
    return [sum(name.startswith("layers.") for name in stage) for stage in stages.modules], stages.ranks


LESS = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 2}
LOOPED = {"pipeline_parallel_schedule": "LoopedBFS", "pipeline_parallel_layers_per_stage": 1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ([2, 3, 3, 2], (0, 1, 2, 3))),
        (LESS, ([3, 3, 3, 1], (0, 1, 2, 3))),
        ({"pipeline_parallel_schedule": "DualPipeV"}, ([1, 2, 2, 2, 1, 1, 1, 0], (0, 1, 2, 3, 3, 2, 1, 0))),
        ({"frozen_layers": 6}, ([4, 3, 2, 1], (0, 1, 2, 3))),
        (LOOPED, ([0] + [1] * 10 + [0], (0, 1, 2, 3) * 3)),
    ],
)
def test_layers_are_spread_with_embedding_and_output_counted(options, expected):
    assert layers(**options) == expected


EVEN = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}


@pytest.mark.parametrize(
    ("costs", "frozen_layers", "expected"),
    [
        (None, 0, [4, 4]),
        ([2] * 8, 0, [4, 4]),
        ([1, 1, 1, 1, 2, 2, 2, 2], 0, [5, 3]),
        ([0.5, 0.5, 0.5, 0.5, 2.5, 2.5, 2.5, 2.5], 0, [6, 2]),
        ([3, 3, 1, 1, 1, 1, 1, 1], 0, [2, 6]),
        # A frozen layer costs a third, whatever its forward costs.
        ([1, 1, 1, 1, 2, 2, 2, 2], 4, [6, 2]),
    ],
)
def test_stages_have_equal_costs(costs, frozen_layers, expected):
    parallelism = Parallelism(pipeline_parallel_degree=2, **EVEN)
    found = layers_of_stages(parallelism, n_layers=8, frozen_layers=frozen_layers, layer_costs=costs)
    assert found == expected


def test_embedding_and_output_cost_as_much_as_average_layers():
    parallelism = Parallelism(pipeline_parallel_degree=2)
    assert layers_of_stages(parallelism, n_layers=8, frozen_layers=0, layer_costs=[7] * 8) == [4, 4]
    assert layers_of_stages(parallelism, n_layers=8, frozen_layers=0, layer_costs=[1] * 6 + [9] * 2) == [7, 1]


def test_a_file_that_is_no_schedule_is_a_value_error(tmp_path):
    file = tmp_path / "schedule.csv"
    for text, fragment in (("0F0," + "x" * 200_000, "field larger than field limit"), ("0F0,2F0", "its stages are")):
        file.write_text(text)
        with pytest.raises(ValueError, match=fragment):
            read_schedule_file(str(file))
