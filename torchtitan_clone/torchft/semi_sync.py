"""Semi-synchronous training: replica groups train independently for a *round* of steps, then average their weights.

At the end of a round the groups average how far their weights have moved from the *global weights*, of which every
group has a copy, and an outer optimizer moves the global weights by that average. Training continues from there.
With several *fragments* of the model each round averages one of them, in turn. A round is committed by all groups, or
rolled back to a copy in host memory of the state at its start.
Source: LocalSGD arXiv 1805.09767, DiLoCo arXiv 2311.08105, Streaming DiLoCo arXiv 2501.18512.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.replicas.protocol import Metadata, ReplicaContext
from torchtitan_clone.torchft.group import TorchFTGroup
from torchtitan_clone.torchft.outer import OuterWeights, split_into_fragments


class SemiSyncGroup(TorchFTGroup):
    """A replica group that commits a round of steps."""

    def __init__(self, options: FaultTolerance, *, run: ReplicaContext):
        self._fragments = split_into_fragments(run.names, options, own=run.parameters)
        self._steps_per_round = options.sync_steps // len(self._fragments)
        super().__init__(options, run=run, steps_per_commit=self._steps_per_round)
        self._outer_weights = OuterWeights(run.outer_weights, parameters=run.parameters, options=options)
        self._delay_steps = options.fragment_sync_delay
        self._steps_in_round = 0
        self._outer_gradients: dict[str, Tensor] = {}
        self._finish_sum: Callable[[], None] = lambda: None
        self._start_tensors: dict[str, Tensor] = {}
        self._start_metadata: Metadata = {}

    def begin_step(self) -> bool:
        """Forms a quorum and copies the state at the start of a round; within a round only starts the timeout."""
        if self._steps_in_round:
            self._step_timeout.start()
            return True
        if not super().begin_step():
            return False
        tensors = self.recovery.tensors.items()
        self._start_tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        self._start_metadata = self.recovery.metadata()
        return True

    def sum(self, values: list[float]) -> list[float]:
        return values  # within a round a step concerns this group only

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing."""

    def commit(self, *, healthy: bool) -> bool:
        """Returns `healthy`: a step that is not healthy is repeated by this group. The round may be rolled back."""
        self._step_timeout.stop()
        return healthy

    def complete_step(self) -> bool:
        """Averages a fragment at the end of a round. Returns False if the round was rolled back."""
        self._steps_in_round += 1
        names = self._fragments[self.quorum.num_committed % len(self._fragments)]
        if self._steps_in_round == self._steps_per_round - self._delay_steps:
            self._outer_gradients = {name: self._outer_weights.gradient(name) for name in names}
            self._finish_sum = self._collectives.start_sum(self._outer_gradients.values())
        if self._steps_in_round < self._steps_per_round:
            return True
        self._finish_sum()
        self._gather_stream_positions()
        self._steps_in_round = 0
        if not self.quorum.vote():
            self._roll_back()
            return False
        for name, total in self._outer_gradients.items():
            self._outer_weights.step(name, gradient=total / self.num_replicas)
        return super().complete_step()

    def rolled_back_steps(self) -> set[int]:
        size = self._steps_per_round
        rounds = super().rolled_back_steps()
        return {step for number in rounds for step in range((number - 1) * size + 1, number * size + 1)}

    def close(self) -> None:
        """Rolls back an unfinished round, which the other groups train again with all its samples, and disconnects."""
        if self._steps_in_round:
            self._roll_back()
        super().close()

    @torch.no_grad()
    def _roll_back(self) -> None:
        self.recovery.load_from_peer(self._start_metadata)
        for name, tensor in self.recovery.tensors.items():
            tensor.detach().copy_(self._start_tensors[name])
