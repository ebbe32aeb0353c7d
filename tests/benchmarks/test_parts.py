"""The parts of a step's time (benchmarks/parts.py)."""

import time

import pytest

from benchmarks.parts import HOST, PARTS, WAITING, part_of, record_waiting, seconds_by_part
from tests.support.harness import run_ranks
from tests.support.runs import options
from tests.support.trainers import open_trainer


def parts_of_a_step(argv: list[str]) -> tuple[dict[str, float], float]:
    """Returns the parts of a second step, and how long it took with the profiler's own time."""
    record_waiting()
    with open_trainer(argv) as trainer:
        trainer.train_step(1)
        start = time.perf_counter()
        return seconds_by_part(lambda: trainer.train_step(2)), time.perf_counter() - start


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_are_those_of_the_whole_step(corpus, tmp_path, ranks):
    for seconds, limit in run_ranks(parts_of_a_step, ranks, options(corpus, tmp_path)):
        assert set(seconds) == {*PARTS, HOST}
        assert 0 < sum(seconds.values()) < limit
        assert all(seconds[part] > 0 for part in ("products", "attention", "copies", "other operators", HOST))
        assert (seconds[WAITING] > 0) is (seconds["collectives"] > 0) is (ranks > 1)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::mm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("GeneratedBackwardFor_torchtitan_clone_attend_default", "attention"),
        ("c10d::allreduce_", "collectives"),
        ("fsdp::split_with_sizes_copy", "copies"),
        ("aten::mul_", "other operators"),
        ("MmBackward0", HOST),
    ],
)
def test_an_operator_belongs_to_a_part(name, part):
    assert part_of(name) == part
