"""The learning-rate curve."""

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import LRScheduler, OptimizerGroup
from torchtitan_clone.optim import build_factors, build_schedule, find_schedule_errors
from torchtitan_clone.optim.schedule import Factors


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
    with pytest.raises(ConfigError, match="known: linear, cosine, sqrt, inverse_sqrt"):
        build_schedule(LRScheduler(decay_type="step"), steps=10)


def test_points_replace_the_other_options():
    schedule = LRScheduler(points=[[0, 0.0], [10, 1.0], [90, 1.0], [100, 0.1]], warmup_steps=50)
    factor = build_schedule(schedule, steps=7)
    assert [factor(s) for s in (0, 5, 10, 50, 90, 95, 100, 200)] == pytest.approx([0, 0.5, 1, 1, 1, 0.55, 0.1, 0.1])
    assert build_schedule(LRScheduler(points=[[5, 0.3]]), steps=7)(1) == 0.3


def test_an_inverse_square_root_needs_no_end():
    options = {"warmup_steps": 10, "decay_type": "inverse_sqrt", "min_lr_factor": 0.25}
    factor, longer = (build_schedule(LRScheduler(**options), steps=steps) for steps in (100, 200))
    assert [factor(step) for step in (5, 10, 11, 41, 91)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 1 / 3])
    assert [longer(step) for step in range(1, 101)] == pytest.approx([factor(step) for step in range(1, 101)])
    assert longer(171) == 0.25
    late = build_schedule(LRScheduler(warmup_steps=0, decay_type="inverse_sqrt", decay_ratio=0.5), steps=100)
    assert [late(step) for step in (50, 51, 100, 300)] == pytest.approx([1.0, 1.0, (50 / 99) ** 0.5, 0.5**0.5])
    assert build_schedule(LRScheduler(warmup_steps=0, decay_type="inverse_sqrt"), steps=9)(5) == pytest.approx(5**-0.5)


def test_points_of_the_weight_decay_and_the_momentum_leave_the_rate_alone():
    factors = build_factors(
        LRScheduler(warmup_steps=0, weight_decay_points=[[1, 2.0], [5, 0.0]], momentum_points=[[0, 0.5], [10, 1.0]]),
        steps=10,
    )
    assert factors(3) == Factors(
        lr=build_schedule(LRScheduler(warmup_steps=0), steps=10)(3), weight_decay=1.0, momentum=0.65
    )
    assert build_factors(LRScheduler(), steps=10)(3) == Factors(lr=0.3)


def test_points_of_a_group_are_further_factors_of_its_rate():
    groups = [OptimizerGroup(pattern="a"), OptimizerGroup(pattern="b", lr_points=[[2, 1.0], [6, 0.0]])]
    factors = build_factors(LRScheduler(warmup_steps=0), steps=10, groups=groups)
    lr = build_schedule(LRScheduler(warmup_steps=0), steps=10)
    assert [factors(step) for step in (1, 3, 9)] == [
        Factors(lr=lr(step), lr_of_groups={"b": factor}) for step, factor in ((1, 1.0), (3, 0.75), (9, 0.0))
    ]


WRONG_POINTS = [[[5, 1.0], [5, 0.5]], [[-1, 1.0]], [[1, -0.5]], [[1]], [[1, float("nan")]], [[1, 1e7]]]


@pytest.mark.parametrize("points", WRONG_POINTS)
def test_points_out_of_order_are_an_error(points):
    with pytest.raises(
        ConfigError, match=r"lr_scheduler\.points, \[.*\]: must be \[step, factor\] with a step (ab|of)"
    ):
        build_schedule(LRScheduler(points=points), steps=7)
    with pytest.raises(ConfigError, match=r"lr_scheduler\.weight_decay_points, \[.*\]: must be \[step, factor\]"):
        build_schedule(LRScheduler(weight_decay_points=points), steps=7)
    (error,) = find_schedule_errors(LRScheduler(), [OptimizerGroup(pattern="norm.*", lr_points=points)])
    assert error.startswith('optimizer.groups, pattern "norm.*": lr_points, [')
    assert "]: must be [step, factor] with a step " in error


def test_a_factor_of_the_momentum_is_at_most_one():
    with pytest.raises(ConfigError, match=r"lr_scheduler\.momentum_points, \[1, 1\.1\]: .* a factor from 0 to 1;"):
        build_schedule(LRScheduler(momentum_points=[[1, 1.1]]), steps=7)
