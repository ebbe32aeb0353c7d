"""Semi-synchronous training: replica groups train apart for a *round* of steps, then agree on weights.

At the end of a round the groups average how far their weights have moved from the *global weights*, which all of them
hold, and an outer optimizer moves the global weights by that; training goes on from there. LocalSGD is the case in
which it takes the average as it is. With several *fragments* of the model a round settles one of them, in turn, so that
less is sent at once; the average may be on its way while a group trains on.
Source: LocalSGD arXiv 1805.09767, DiLoCo arXiv 2311.08105, streaming arXiv 2501.18512.

A round is to the other groups what a step is otherwise: it counts in all of them or never was. Each group keeps a copy
of its state from the start of the round, in host memory, to go back to.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.outer import OUTER_OPTIMIZERS, split_into_fragments
from torchtitan_clone.fault_tolerance.torchft_group import TorchFTGroup
from torchtitan_clone.ops.dtensor_shards import local_shard


class SemiSyncGroup(TorchFTGroup):
    """As TorchFTGroup, but what the groups do together they do once a round."""

    def __init__(
        self,
        fault_tolerance: FaultTolerance,
        *,
        parameters: Mapping[str, Tensor],
        outer: Mapping[str, Tensor],
        **others: Any,
    ):
        self._parameters = {name: local_shard(p) for name, p in parameters.items()}
        self._outer_state = {name: local_shard(tensor) for name, tensor in outer.items()}
        self._outer = OUTER_OPTIMIZERS[fault_tolerance.semi_sync_method or ""]
        self._delay, self._alpha = fault_tolerance.fragment_sync_delay, fault_tolerance.fragment_update_alpha
        self._fragments = split_into_fragments(list(parameters), fault_tolerance)
        self._round = fault_tolerance.sync_steps // len(self._fragments)
        self._steps_in_round = 0
        self._sent: list[Any] = []
        self._start: dict[str, Tensor] = {}
        super().__init__(fault_tolerance, rounds_of_steps=self._round, **others)

    def begin(self) -> bool:
        """Meets the other groups at the start of a round."""
        if self._steps_in_round:
            self._watch.start()
            return True
        if not super().begin():
            return False
        self._start = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._healing.tensors.items()}
        self._start_note = self._healing.note()
        return True

    def lost_steps(self) -> set[int]:
        """Those of the rounds that were lost."""
        rounds = super().lost_steps()
        return {step for number in rounds for step in range((number - 1) * self._round + 1, number * self._round + 1)}

    def sum(self, values: list[float]) -> list[float]:
        """A step is this group's own."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step is this group's own."""

    def commit(self, *, healthy: bool) -> bool:
        """Whether the step counts in this group; the round may still be taken back."""
        self._watch.stop()
        return healthy

    def complete(self) -> bool:
        """After each step; at the end of a round False if it was taken back, with all that belongs to the state."""
        self._steps_in_round += 1
        names = self._fragments[self._manager.current_step() % len(self._fragments)]
        if self._steps_in_round == self._round - self._delay:
            self._moved = [self._global(name) - self._parameters[name].detach() for name in names]
            self._sent = self._send(self._moved)
        if self._steps_in_round < self._round:
            return True
        self._receive(self._sent)
        positions = self._gather(self._healing.positions())
        self._steps_in_round = 0
        if not self._vote():
            self._go_back()
            return False
        self._healing.take_positions(positions)
        for name, moved in zip(names, self._moved, strict=True):
            self._step(name, moved / self.parts)
        return True

    def _global(self, name: str) -> Tensor:
        return self._outer_state[f"outer/global/{name}"]

    @torch.no_grad()
    def _step(self, name: str, gradient: Tensor) -> None:
        """Moves one global weight, and the group's own to it, or only near it."""
        target, weight = self._global(name), self._parameters[name]
        if self._outer.momentum:
            momentum = self._outer_state[f"outer/momentum/{name}"]
            momentum.mul_(self._outer.momentum).add_(gradient)
            gradient = gradient + self._outer.momentum * momentum
        target.sub_(gradient, alpha=self._outer.lr)
        weight.copy_(target.lerp(weight, self._alpha))

    @torch.no_grad()
    def _go_back(self) -> None:
        self._healing.take_over(self._start_note)
        for name, tensor in self._healing.tensors.items():
            tensor.detach().copy_(self._start[name])

    def close(self) -> None:
        """A round that has not ended is taken back: the other groups do it again, with all its rows."""
        if self._steps_in_round:
            self._go_back()
        super().close()
