"""Optimizers and learning-rate schedules, each named in one dict."""

from torchtitan_clone.optim.container import OPTIMIZERS, OptimizerContainer, build_optimizer
from torchtitan_clone.optim.schedule import SCHEDULES, build_schedule

__all__ = ["OPTIMIZERS", "SCHEDULES", "OptimizerContainer", "build_optimizer", "build_schedule"]
