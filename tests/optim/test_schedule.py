"""The learning-rate curve."""

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import LRScheduler
from torchtitan_clone.optim import build_schedule


def test_warmup_stable_decay():
    factor = build_schedule(LRScheduler(warmup_steps=10, decay_ratio=0.2, min_lr_factor=0.1), steps=100)
    assert [factor(s) for s in (1, 5, 10, 50, 80, 81)] == pytest.approx([0.1, 0.5, 1, 1, 1, 1])
    assert factor(91) == pytest.approx(0.1 + 0.9 * 0.5)
    assert factor(100) == pytest.approx(0.1 + 0.9 * 0.05)


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_decay_shapes(shape, middle):
    factor = build_schedule(LRScheduler(warmup_steps=0, decay_type=shape), steps=100)
    values = [factor(s) for s in range(1, 101)]
    assert values[0] == 1
    assert values[50] == pytest.approx(middle)
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 0.02


def test_total_steps_is_the_length_of_the_schedule():
    factor = build_schedule(LRScheduler(warmup_steps=10, total_steps=100), steps=20)
    longer = build_schedule(LRScheduler(warmup_steps=10), steps=100)
    assert [factor(step) for step in range(1, 101)] == [longer(step) for step in range(1, 101)]
    ended = build_schedule(LRScheduler(warmup_steps=0, total_steps=5, min_lr_factor=0.25), steps=20)
    assert [ended(step) for step in (6, 20)] == [0.25, 0.25]


def test_a_warmup_longer_than_the_schedule_is_clipped():
    factor = build_schedule(LRScheduler(warmup_steps=200), steps=4)
    assert [factor(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("changes", [{"warmup_steps": 200}, {"warmup_steps": 1, "decay_ratio": 0.1}])
def test_a_schedule_without_decay_keeps_its_peak_after_its_end(changes):
    factor = build_schedule(LRScheduler(total_steps=4, min_lr_factor=0.1, **changes), steps=100)
    assert [factor(step) for step in (4, 5, 6, 100)] == [1.0] * 4


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known: linear, cosine, sqrt"):
        build_schedule(LRScheduler(decay_type="step"), steps=10)


def test_points_replace_the_other_options():
    schedule = LRScheduler(points=[[0, 0.0], [10, 1.0], [90, 1.0], [100, 0.1]], warmup_steps=50)
    factor = build_schedule(schedule, steps=7)
    assert [factor(s) for s in (0, 5, 10, 50, 90, 95, 100, 200)] == pytest.approx([0, 0.5, 1, 1, 1, 0.55, 0.1, 0.1])
    assert build_schedule(LRScheduler(points=[[5, 0.3]]), steps=7)(1) == 0.3


WRONG_POINTS = [[[5, 1.0], [5, 0.5]], [[-1, 1.0]], [[1, -0.5]], [[1]], [[1, float("nan")]], [[1, 1e7]]]


@pytest.mark.parametrize("points", WRONG_POINTS)
def test_points_out_of_order_are_an_error(points):
    with pytest.raises(
        ConfigError, match=r"lr_scheduler\.points, \[.*\]: must be \[step, factor\] with a step (ab|of)"
    ):
        build_schedule(LRScheduler(points=points), steps=7)
