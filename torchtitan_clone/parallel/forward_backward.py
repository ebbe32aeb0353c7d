"""Runs forward and backward of one step. Legend: B batch, T tokens, A auxiliary terms of the model, K depths."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.parallel.teacher import TeacherOfRows, teacher_tensors, with_teacher
from torchtitan_clone.parallel.unsharded import unsharded_parameters, unwrapped_parameters

T = TypeVar("T")
LossFn = Callable[..., Tensor]  # see ops.cross_entropy.build_loss()


class Rows(Protocol):
    """A batch: rows of tokens with their positions, documents and targets."""

    @property
    def tokens_BT(self) -> Tensor: ...
    @property
    def positions_BT(self) -> Tensor: ...
    @property
    def documents_BT(self) -> Tensor | None: ...
    @property
    def targets_BT(self) -> Tensor: ...
    @property
    def mtp_targets_BKT(self) -> Tensor | None: ...
    @property
    def is_context_BKT(self) -> Tensor | None: ...
    @property
    def groups_BT(self) -> Tensor | None: ...


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one forward and backward returns, detached: sums [] over this rank's tokens, divided by all targets.

    `auxiliary` has each auxiliary term of the model by name, without its coefficient.
    """

    loss: Tensor
    auxiliary: dict[str, Tensor]


class ForwardBackward(Protocol):
    """Accumulates the gradients of (loss + sum of coefficient * auxiliary term) / `num_targets`, sums over tokens."""

    def __call__(self, microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput: ...


def auxiliary_terms(model: nn.Module) -> Mapping[str, float]:
    """Returns the coefficient of each auxiliary term (`model.auxiliary`, if any), in the order of the model's sums."""
    return getattr(model, "auxiliary", {})


class Objective:
    """Computes the scalar that backward starts from, and accumulates the loss and the auxiliary terms of a step."""

    def __init__(self, auxiliary: Mapping[str, float], *, device: torch.device):
        self._names = list(auxiliary)
        self._weights = torch.tensor([1.0, *auxiliary.values()], device=device)
        self._num_targets = 1
        self._total = torch.zeros((1 + len(auxiliary),) if auxiliary else (), device=device)
        self._means_of_pass: list[Tensor] = []

    def begin_step(self, *, num_targets: int) -> None:
        self._num_targets = num_targets
        self._total = torch.zeros_like(self._total)
        self._means_of_pass = []

    def add(self, sums: Tensor) -> Tensor:
        """Adds a micro-batch, whose sums are the loss [] or with its terms [1 + A], and returns its objective []."""
        means = sums / self._num_targets
        self._means_of_pass.append(means.detach())
        return means @ self._weights if self._names else means

    def end_pass(self) -> None:
        """Ends a pass of one or several micro-batches; a rank without the last pipeline stage has none."""
        if self._means_of_pass:
            self._total += reduce(torch.add, self._means_of_pass)
            self._means_of_pass = []

    def output(self) -> StepOutput:
        if not self._names:
            return StepOutput(loss=self._total, auxiliary={})
        loss, *terms = self._total.unbind()
        return StepOutput(loss=loss, auxiliary=dict(zip(self._names, terms, strict=True)))


def build_forward_backward(
    model: nn.Module, *, loss_fn: LossFn, device: torch.device, teacher: TeacherOfRows | None = None
) -> ForwardBackward:
    """Returns the step for a model that is complete on this rank; pipeline.py has the pipelined one.

    `teacher` is that of each micro-batch, which the loss gets where there are gradients.
    """
    objective = Objective(auxiliary_terms(model), device=device)
    unsharded = unsharded_parameters(model)

    def run(microbatches: Iterable[Rows], *, num_targets: int) -> StepOutput:
        objective.begin_step(num_targets=num_targets)
        with nullcontext() if unsharded is None else unwrapped_parameters([model]):
            for rows, is_last in _with_last(microbatches):
                # Gradients are reduced over ranks once, after the last micro-batch.
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(is_last)
                if unsharded is not None:
                    unsharded.set_last(is_last)
                documents_BT = None if rows.documents_BT is None else OnHost(rows.documents_BT)
                sums = model(
                    rows.tokens_BT, positions_BT=rows.positions_BT, documents_BT=documents_BT,
                    targets_BT=rows.targets_BT, loss_fn=with_teacher(loss_fn, teacher, teacher_tensors(rows)),
                    **optional_tensors(rows),
                )  # fmt: skip
                mean = objective.add(sums)
                if torch.is_grad_enabled():
                    mean.backward()
                objective.end_pass()
        return objective.output()

    return run


def optional_tensors(rows: Rows) -> dict[str, Tensor]:
    """Returns the keywords of the model for what only some batches have besides documents."""
    names = ("mtp_targets_BKT", "is_context_BKT", "groups_BT")
    return {name: tensor for name in names if (tensor := getattr(rows, name)) is not None}


def _with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item, and whether it is the last one; reads one ahead."""
    iterator = iter(items)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True
