"""Private names of torch that only a simulation needs, behind public ones that say why."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def name_fsdp_modules(model: nn.Module) -> None:
    """Names the modules in FSDP's records now, not in the first forward, before which a pipeline gathers weights."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


_resize = torch.UntypedStorage.resize_


def on_resize(observe: Callable[[torch.UntypedStorage], None] | None) -> None:
    """Calls `observe` after each change of a storage's size, of which a dispatch mode is not told; None ends that."""

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        _resize(self, size)
        if observe is not None:
            observe(self)
        return self

    torch.UntypedStorage.resize_ = _resize if observe is None else resize


_NOTHING = nullcontext()


@contextmanager
def around_dtensor(
    *,
    redistribution: AbstractContextManager[object] = _NOTHING,
    shapes: AbstractContextManager[object] = _NOTHING,
) -> Iterator[None]:
    """Enters contexts while DTensor redistributes arguments of an operator, and while it computes shapes of results.

    A dispatch mode sees the operators inside both, and nothing public tells it what they are for.
    """
    from torch.distributed.tensor._dispatch import OpDispatcher
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    redistribute, propagate = OpDispatcher.redistribute_local_args, ShardingPropagator._propagate_tensor_meta_non_cached

    def redistribute_inside(*args: Any, **kwargs: Any) -> Any:
        with redistribution:
            return redistribute(*args, **kwargs)

    def propagate_inside(*args: Any, **kwargs: Any) -> Any:
        with shapes:
            return propagate(*args, **kwargs)

    OpDispatcher.redistribute_local_args = staticmethod(redistribute_inside)
    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_inside
    try:
        yield
    finally:
        OpDispatcher.redistribute_local_args = staticmethod(redistribute)
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate
