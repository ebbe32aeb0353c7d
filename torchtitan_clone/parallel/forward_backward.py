"""How one forward and backward runs, and what becomes of its gradients."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_clone.ops.dtensor_shards import local_shard


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
        for rows, is_last in _with_last(microbatches):
            if isinstance(model, FSDPModule):
                # Gradients are reduced over ranks once, after the last micro-batch.
                model.set_requires_gradient_sync(is_last)
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


def _with_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last; one is read ahead."""
    iterator = iter(items)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
    """Scales all gradients so that their norm over the whole model is at most `max_norm`; returns the norm before.

    A collective over all ranks: a parameter may be whole, or a shard on any axis, or live on some pipeline stages only.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [local_shard(gradient) for gradient in gradients]
    squares = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    if local:  # a rank whose blocks are all frozen has none
        # In fp32 torch's norm of a large tensor on CPU is off by 1e-5, differently for each way of sharding.
        norms = torch.stack(torch._foreach_norm(local, 2, torch.float64))
        # What several ranks hold alike counts once, so that one sum over all ranks is enough for every mesh.
        copies = torch.tensor([_copies(g) for g in gradients], dtype=torch.float64).to(norms.device, non_blocking=True)
        squares = (norms.square() / copies).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    norm = squares.sqrt().float()
    if local:
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(gradient: Tensor) -> int:
    """How many ranks hold the same part of this gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return prod(size for size, placement in sizes if placement.is_replicate())


def sum_over_ranks(values: list[float]) -> list[float]:
    """Sums each number over all ranks; a collective on the CPU, so that no device waits for it."""
    if dist.get_world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()
