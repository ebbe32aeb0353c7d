"""Marks that several files of tests use."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from torchtitan_clone import doors
from torchtitan_clone.run.preflight import SPLITS_BACKWARD_SINCE

needs_split_backward = pytest.mark.skipif(
    torch.__version__ < SPLITS_BACKWARD_SINCE,
    reason=f"before torch {SPLITS_BACKWARD_SINCE} runs with a schedule that splits backward are refused",
)
MANY_RANKS = 4


def needs_door(name: str) -> pytest.MarkDecorator:
    """Marks tests that use the package behind a door: they are skipped while it is closed."""
    return pytest.mark.skipif(doors.why_closed(name) is not None, reason=f"needs the door {name}")


def marked(cases: Mapping[str, Sequence[object]]) -> list[object]:
    """Returns the names of cases as parameters; those whose first item is a large number of ranks are marked."""
    return [
        pytest.param(name, marks=[pytest.mark.many_ranks] * (isinstance(ranks, int) and ranks >= MANY_RANKS))
        for name, (ranks, *_) in cases.items()
    ]
