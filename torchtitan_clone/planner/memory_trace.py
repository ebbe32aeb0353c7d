"""Records what a step on fake tensors allocates and frees: how much, on which stream and for what."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_clone import torch_compat
from torchtitan_clone.comm.tracing import COPIES_OF_WEIGHTS, Mark, collective_name
from torchtitan_clone.planner.torch_compat import around_dtensor, on_resize
from torchtitan_clone.torch_compat import Operator, TorchDispatchMode, tree_leaves

SHAPES = Mark()
"""DTensor computes the shapes of results, with tensors of global sizes."""
_OF_FSDP = {"all_gather": "gathered", "all_gather_copy_out": "gathered", "post_backward_reduce": "buffers"}


class Event(NamedTuple):
    """An allocation of `size` bytes on a stream, or with size 0 the end of the allocation of this number."""

    block: int
    size: int
    stream: int
    part: str


class MemoryTrace(TorchDispatchMode):
    """Records the allocations of the storages that are made inside it, as what `part` says at the time.

    Not those on the meta device, nor the tensors of global sizes from which DTensor computes the shapes of results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = "weights"
        self.events: list[Event] = []
        self._allocations: list[int] = []
        """Index of the event of each block."""
        self._blocks: dict[int, tuple[int | None, weakref.ref[torch.UntypedStorage]]] = {}
        """The block of each storage by its identity; None while the storage is empty."""
        self._annotations: list[str] = []
        self._streams: dict[object, int] = {torch.cpu.current_stream(): 0}
        self._loss_nodes: list[range] = []
        self._opened = ExitStack()

    def __enter__(self) -> "MemoryTrace":
        on_resize(self._update)
        self._opened.enter_context(around_dtensor(shapes=SHAPES))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._opened.close()
        on_resize(None)

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if DTensor in types:
            return NotImplemented  # DTensor runs first, and its local tensors come here
        result = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":
            self._annotate(func, args)
        elif not SHAPES.is_active:
            part = "gathered" if COPIES_OF_WEIGHTS.is_active else "buffers" if collective_name(func) else None
            for value in _tensors(result):
                self._update(value.untyped_storage(), part=part)
            if self._running_part() == "buffers":
                self.name_gradients(_tensors(args))
        return result

    def follow_loss(self, loss: nn.Module) -> None:
        """Books what a module allocates, in its backward too, as that of the loss."""
        starts: list[tuple[int, str]] = []

        def enter(*_: object) -> None:
            starts.append((torch_compat.next_autograd_node(), self.part))
            self.part = "loss"

        def leave(*_: object) -> None:
            start, self.part = starts.pop()
            self._loss_nodes.append(range(start, torch_compat.next_autograd_node()))

        loss.register_forward_pre_hook(enter)
        loss.register_forward_hook(leave)

    def _annotate(self, func: Operator, args: tuple) -> None:
        """Follows record_function(), with which FSDP names what it does."""
        if func.name().startswith("profiler::_record_function_enter"):
            self._annotations.append(args[0])
        else:
            self._annotations.pop()

    def _index_of(self, x: Tensor) -> int | None:
        """Returns the index of the event that allocated a tensor."""
        block, _ = self._blocks.get(id(torch_compat.local_storage(x)), (None, None))
        return None if block is None else self._allocations[block]

    def name_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Books tensors as gradients, such as those that FSDP reduces, which were booked as activations."""
        for x in tensors:
            index = self._index_of(x)
            if index is not None and self.events[index].part == "activations":
                self.events[index] = self.events[index]._replace(part="gradients")

    def _update(self, storage: torch.UntypedStorage, *, part: str | None = None) -> None:
        """Notes the present size of a storage."""
        key, size = id(storage), storage.nbytes()
        block, reference = self._blocks.get(key, (None, None))
        if block is not None:
            if self.events[self._allocations[block]].size == size:
                return
            self._free(block)
        block = len(self._allocations) if size else None
        if block is not None:
            self._allocations.append(len(self.events))
            part = part or self._running_part()
            self.events.append(Event(block, size, self._stream(), part))
        self._blocks[key] = block, reference or weakref.ref(storage, partial(self._forget, key))

    def _running_part(self) -> str:
        for annotation in reversed(self._annotations):
            if annotation.startswith("FSDP::"):
                part = _OF_FSDP.get(annotation.partition("::")[2].partition(" ")[0], self.part)
                # FSDP reduces on a stream of its own, into what becomes the gradients.
                return "gradients" if part == "buffers" and self._stream() else part
        node = torch_compat.running_autograd_node()
        return "loss" if node is not None and any(node in nodes for nodes in self._loss_nodes) else self.part

    def _stream(self) -> int:
        """Returns the number of the current stream, 0 for that of the computation."""
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def _forget(self, key: int, _reference: object) -> None:
        block, _ = self._blocks.pop(key)
        if block is not None:
            self._free(block)

    def _free(self, block: int) -> None:
        self.events.append(self.events[self._allocations[block]]._replace(size=0))


def _tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.device.type != "meta"]
