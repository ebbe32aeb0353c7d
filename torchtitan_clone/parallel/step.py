"""How one forward and backward runs, and what becomes of its gradients."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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


class ForwardBackward(Protocol):
    """Runs micro-batches forward and, unless gradients are off, backward.

    Gradients of the sum of losses over `num_targets` add up in the parameters; the returned loss is this rank's
    share of it, detached. With gradients off it is validation.
    """

    def __call__(self, microbatches: Iterable[Rows], *, num_targets: int) -> Tensor: ...


def build_forward_backward(
    model: nn.Module, *, loss_fn: Callable[..., Tensor], device: torch.device
) -> ForwardBackward:
    """The plain way: the whole model on this rank, one micro-batch after the other."""

    def run(microbatches: Iterable[Any], *, num_targets: int) -> Tensor:
        total = torch.zeros((), device=device)
        microbatches = list(microbatches)
        for index, rows in enumerate(microbatches):
            if isinstance(model, FSDPModule):
                # Gradients are reduced over ranks once, after the last micro-batch.
                model.set_requires_gradient_sync(index == len(microbatches) - 1)
            loss_sum = model(
                rows.tokens_BT,
                positions_BT=rows.positions_BT,
                documents_BT=rows.documents_BT,
                targets_BT=rows.targets_BT,
                loss_fn=loss_fn,
            )
            loss = loss_sum / num_targets
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.detach()
        return total

    return run


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
    """Scales all gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

    A collective: every rank of the mesh must call it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], max_norm, norm)
    return norm


def sum_over_ranks(values: list[float]) -> list[float]:
    """Sums each number over all ranks; a collective on the CPU, so that no device waits for it."""
    if dist.get_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()
