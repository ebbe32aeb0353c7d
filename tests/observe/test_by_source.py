"""Columns of the metrics by source."""

import math

import pytest

from torchtitan_clone.observe.by_source import add_totals, scale_bytes, source_columns


def test_columns_are_means_over_all_steps():
    totals = add_totals(add_totals({}, {"a": (4.0, 2, 8), "b": (0.0, 0, 0)}), {"a": (2.0, 1, 1), "b": (3.0, 2, 0)})
    expected = {"x_loss/a": 2.0, "x_loss/b": 1.5, "x_bits_per_byte/a": 6 / 9 / math.log(2)}
    assert add_totals(totals, {}) == totals  # of a step that was skipped
    assert source_columns(totals, prefix="x_") == pytest.approx(expected)
    assert scale_bytes(totals, {"a": 2.0}) == {"a": (6.0, 3, 18.0), "b": (3.0, 2, 0)}
