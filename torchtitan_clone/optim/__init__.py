"""Optimizers and learning-rate schedules, each named in one dict."""

from torchtitan_clone.optim.container import build_optimizer
from torchtitan_clone.optim.groups import find_optimizer_errors
from torchtitan_clone.optim.matrices import MatrixLayout
from torchtitan_clone.optim.optimizers import OPTIMIZERS, OptimizerKind
from torchtitan_clone.optim.schedule import SCHEDULES, build_schedule, find_schedule_errors

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "MatrixLayout",
    "OptimizerKind",
    "build_optimizer",
    "build_schedule",
    "find_optimizer_errors",
]
__all__ += ["find_schedule_errors"]
