"""Tests of apply.py: combinations of parallelism train like one device; some of the cases of scripts/parity.py."""

import math
from functools import cache

import pytest
import torch

from tests.marks import marked
from tests.support.parity import (
    Difference,
    compare,
    largest_difference,
    relative_difference,
)
from tests.support.parity_matrix import QUICK, all_cases
from tests.support.sabotage import MISTAKES

CASES = all_cases()


@pytest.fixture(scope="module")
def references():
    """Caches losses of one device, by the options that change its mathematics."""
    return {}


@pytest.fixture(scope="module")
def differences(corpus, tmp_path_factory, references):
    """Returns a function that gives the differences of all cases of as many ranks; the same processes train them."""

    @cache
    def of(world_size):
        names = [name for name in QUICK if CASES[name][0] == world_size]
        cases = [CASES[name][1] for name in names]
        folder = tmp_path_factory.mktemp(f"parity{world_size}")
        found = compare(corpus, folder, cases, world_size=world_size, references=references)
        return dict(zip(names, found, strict=True))

    return of


@pytest.mark.parametrize("name", marked({name: CASES[name] for name in QUICK}))
def test_parity(differences, name):
    difference = differences(CASES[name][0])[name]
    assert difference.is_parity, difference


NOTICES = {
    "gradients of shards are not summed": {"grad_norm", "gradient", "weight"},
    "norm counts tensor parallel copies twice": {"grad_norm"},
    "gradients of the shared rotary key are not summed": {"gradient", "weight"},
    "learning rate differs on the first rank": {"loss", "weight"},
}
"""What differs at least after some of the mistakes."""


@pytest.mark.parametrize("name", marked({name: CASES[mistake.case] for name, mistake in MISTAKES.items()}))
def test_planted_mistake_is_noticed(corpus, tmp_path, references, name):
    """The same as `scripts/parity.py --sabotage`."""
    world_size, changes = CASES[MISTAKES[name].case]
    (found,) = compare(corpus, tmp_path, [changes], world_size=world_size, references=references, mistake=name)
    assert not found.is_parity
    different = {key for key, value in vars(found).items() if value > (1e-5 if key == "loss" else 1e-4)}
    assert different >= NOTICES.get(name, set())


def test_mistakes_are_planted_in_cases_of_the_matrix():
    assert len(MISTAKES) >= 10
    assert {mistake.case for mistake in MISTAKES.values()} <= set(CASES)
    assert NOTICES.keys() <= MISTAKES.keys()


def test_nan_on_any_rank_is_no_parity():
    right, wrong = torch.ones(2), torch.tensor([1.0, math.nan])
    assert math.isnan(relative_difference([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))
    assert math.isnan(relative_difference([1.0, None], [1.0, 1.0]))
    assert math.isnan(largest_difference([{"a": wrong}, {"a": right}], {"a": right}))
    assert not Difference(loss=0, grad_norm=0, gradient=0, weight=math.nan).is_parity
    assert not Difference(loss=0, grad_norm=math.nan, gradient=0, weight=0).is_parity
    assert largest_difference([{"a": 2 * right}, {"a": right}], {"a": right}) == 1.0
