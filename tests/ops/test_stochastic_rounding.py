"""Rounding at random: its expectation is the value, its draws look independent and follow from positions alone."""

import math

import pytest
import torch

from torchtitan_clone.ops.stochastic_rounding import chunks, round_into


def draws_of(shape, *, seed=0, step=1, name="w"):
    """Returns both draws of all elements, as fractions."""
    whole = torch.empty(shape)
    drawn = torch.zeros(2, *shape)
    for chunk in chunks(whole, seed=seed, step=step, name=name):
        for target, draws in zip(drawn, (chunk.first, chunk.second), strict=True):
            assert 0 <= draws.min() <= draws.max() <= 0xFFFF
            chunk.of(target).copy_(draws)
    return drawn / 2**16 - 0.5


def test_draws_are_uniform_and_independent():
    """Of neighbours, of the two draws, of steps, seeds and names: below five standard deviations of chance."""
    first, second = draws_of((512, 512))
    bound = 5 / (12 * 512)
    for draws in (first, second):
        assert abs(draws.mean()) < 5 / math.sqrt(12) / 512
        counts = torch.histc(draws, bins=64, min=-0.5, max=0.5)
        assert ((counts - 4096) ** 2 / 4096).sum() < 63 + 5 * math.sqrt(126)
        assert abs((draws[1:] * draws[:-1]).mean()) < bound
        assert abs((draws[:, 1:] * draws[:, :-1]).mean()) < bound
        assert abs((draws[1:, 1:] * draws[1:, :-1] * draws[:-1, 1:] * draws[:-1, :-1]).mean()) < bound / 12
    others = [second, *(draws_of((512, 512), **{key: value})[0] for key, value in (("seed", 1), ("step", 2)))]
    others.append(draws_of((512, 512), name="v")[0])
    assert all(abs((first * other).mean()) < bound for other in others)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -(3.0 + 2**-9), 1e-30, -1e-41])
def test_the_expectation_is_the_value(value):
    values = torch.full((64, 4096), value)
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    for chunk in chunks(values, seed=0, step=1, name="w"):
        round_into(chunk.of(rounded), chunk.of(values.clone()), chunk.second)
    levels = rounded.double().unique()
    assert len(levels) == 2
    assert levels.min() < values[0, 0].double() < levels.max()
    step = (levels.max() - levels.min()).item()
    assert abs(rounded.double().mean() - values[0, 0].double()) < 5 * 0.5 * step / math.sqrt(values.numel())


def test_what_bfloat16_holds_is_kept():
    values = torch.randn(100, 100).bfloat16().float()
    values[0, :3] = torch.tensor([0.0, -0.0, math.inf])
    rounded = torch.empty(values.shape, dtype=torch.bfloat16)
    for chunk in chunks(values, seed=0, step=1, name="w"):
        round_into(chunk.of(rounded), chunk.of(values.clone()), chunk.first)
    assert torch.equal(rounded.float(), values)


def test_the_draws_of_an_element_do_not_depend_on_chunks():
    """A vector and a matrix of more elements than a chunk, and one whose rows have more."""
    for shape in ((200_000,), (700, 300), (3, 70_000), (3, 5, 7)):
        drawn = draws_of(shape)
        assert torch.equal(drawn, draws_of(shape))
        assert drawn.flatten(1)[0].unique().numel() > 0.7 * min(2**16, drawn[0].numel()) / 2
