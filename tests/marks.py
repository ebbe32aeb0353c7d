"""Marks for tests that run pipeline schedules."""

import pytest
import torch

from torchtitan_clone.run.preflight import SPLITS_BACKWARD_SINCE

needs_split_backward = pytest.mark.skipif(
    torch.__version__ < SPLITS_BACKWARD_SINCE,
    reason=f"before torch {SPLITS_BACKWARD_SINCE} runs with a schedule that splits backward are refused",
)
