"""Optimizers and learning-rate schedules, each named in one dict.

A *group* is the parameters that share an optimizer and all of its settings (`groups.py`). The *container* holds one
torch optimizer for each name among the groups, and their state by parameter name. A *schedule* is the factor of a
setting of every group in a step. Optimizers of matrices compute with whole ones: a *matrix* has one *owner* among the
ranks that hold *parts* of it (`matrices.py`).
"""

from torchtitan_clone.optim.container import build_optimizer
from torchtitan_clone.optim.groups import find_optimizer_errors, optimizer_state_bytes
from torchtitan_clone.optim.optimizers import OPTIMIZERS, OptimizerKind
from torchtitan_clone.optim.schedule import SCHEDULES, build_factors, build_schedule, find_schedule_errors

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "OptimizerKind",
    "build_factors",
    "build_optimizer",
    "build_schedule",
    "find_optimizer_errors",
]
__all__ += ["find_schedule_errors", "optimizer_state_bytes"]
