"""What the loss of a micro-batch gets of a teacher; run/teacher.py has teachers, ops/distillation.py the loss."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

TeacherOfRows = Callable[..., Tensor]
"""Called with the function that Teacher in ops/distillation.py gets, and with teacher_tensors()."""
_TENSORS = ("tokens_BT", "targets_BT", "positions_BT", "documents_BT", "teacher_ids_BKT", "teacher_values_BKT")


def teacher_tensors(rows: object) -> dict[str, Tensor]:
    """Returns what a teacher predicts from, or has predicted, by name; of each the first dimension is that of rows."""
    return {name: tensor for name in _TENSORS if (tensor := getattr(rows, name, None)) is not None}


def with_teacher(
    loss_fn: Callable[..., Tensor], teacher: TeacherOfRows | None, tensors: Mapping[str, Tensor]
) -> Callable[..., Tensor]:
    """Returns the loss function of rows with these teacher_tensors()."""
    return loss_fn if teacher is None else partial(loss_fn, teacher=partial(teacher, **tensors))
