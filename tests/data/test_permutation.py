"""The shuffled order is a permutation for every size and has no visible structure."""

import numpy as np
import pytest

from torchtitan_clone.data.dataset import permute


def order(n: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """Returns the permutation of n elements."""
    return permute(np.arange(n), n=n, seed=seed, epoch=epoch)


def test_every_small_size_is_a_permutation():
    for n in range(1, 400):
        for epoch in range(3):
            assert np.array_equal(np.sort(order(n, epoch=epoch)), np.arange(n)), (n, epoch)


@pytest.mark.parametrize("n", [9973, 65536, 65537, 104729, 1_000_003])
def test_large_sizes_are_permutations(n):
    assert np.array_equal(np.bincount(order(n), minlength=n), np.ones(n))


def test_sizes_beyond_memory_stay_in_range_and_are_one_to_one():
    n = 10**12 + 39
    found = permute(np.arange(100_000), n=n, seed=1, epoch=2)
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(found)
    assert 0.49 < found.mean() / n < 0.51


def test_a_position_does_not_depend_on_the_others_requested():
    assert order(1000)[[7, 3, 999]].tolist() == permute(np.array([7, 3, 999]), n=1000, seed=0, epoch=0).tolist()


def test_seeds_and_epochs_give_unrelated_orders():
    n = 10_000
    base = order(n)
    for other in (order(n, epoch=1), order(n, seed=1), order(n, seed=-1), np.arange(n)):
        assert np.count_nonzero(base == other) < 10  # expected: 1
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.05


def test_all_orders_of_a_small_set_are_equally_frequent():
    orders, counts = np.unique([order(4, epoch=epoch) for epoch in range(4800)], axis=0, return_counts=True)
    assert len(orders) == 24
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 60, counts  # 23 degrees of freedom: beyond 50 in 1 of 1000


def test_a_position_is_mapped_uniformly():
    n, bins = 20_000, 20
    cells = np.zeros((bins, bins))
    np.add.at(cells, (np.arange(n) * bins // n, order(n) * bins // n), 1)
    expected = n / bins**2
    assert ((cells - expected) ** 2 / expected).sum() < 480  # 361 degrees of freedom, standard deviation 27


def test_neighbors_are_separated():
    steps = np.diff(order(100_000))
    assert np.count_nonzero(np.abs(steps) <= 1) < 15  # expected: 2
    assert len(np.unique(steps)) > 73_000  # expected of a random order: 2 (1 - (1 - 1/e)) n = 73,576
