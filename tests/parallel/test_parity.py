"""Tests of apply.py: combinations of parallelism train like one device; some of the cases of scripts/parity.py."""

import pytest

from torchtitan_clone.testing.parity import compare
from torchtitan_clone.testing.parity_matrix import QUICK, all_cases

CASES = all_cases()


@pytest.fixture(scope="module")
def references():
    """Caches losses of one device, by the options that change its mathematics."""
    return {}


@pytest.mark.parametrize("name", QUICK)
def test_parity(corpus, tmp_path, references, name):
    world_size, changes = CASES[name]
    difference = compare(corpus, tmp_path, world_size=world_size, references=references, **changes)
    assert difference.is_parity, difference
