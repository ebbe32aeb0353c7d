"""Semi-synchronous training: replica groups train independently for a *round* of steps, then average their weights.

At the end of a round the groups average how far their weights have moved from the *global weights*, of which every
group has a copy, and an outer optimizer moves the global weights by that average. Training continues from there.
LocalSGD is the case in which the global weights become the average. With several *fragments* of the model each round
averages one of them, in turn, which lowers the peak bandwidth. The average may overlap with the round's last steps.
Source: LocalSGD arXiv 1805.09767, DiLoCo arXiv 2311.08105, Streaming DiLoCo arXiv 2501.18512.

Between groups a round is what a step is in synchronous training: it is committed by all groups, or rolled back. To roll
back, every group keeps a copy of its state at the start of the round in host memory.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.collectives import PendingSum
from torchtitan_clone.fault_tolerance.context import Metadata, ReplicaContext
from torchtitan_clone.fault_tolerance.outer import OUTER_OPTIMIZERS, OuterWeights, split_into_fragments
from torchtitan_clone.fault_tolerance.session import ReplicaSession


def join_semi_sync_group(fault_tolerance: FaultTolerance, *, run: ReplicaContext) -> "SemiSyncGroup":
    """Connects this rank to the lighthouse; ConfigError if the fragments do not cover the model."""
    fragments = split_into_fragments(list(run.parameters), fault_tolerance)
    steps_per_round = fault_tolerance.sync_steps // len(fragments)
    session = ReplicaSession(fault_tolerance, run=run, steps_per_commit=steps_per_round)
    return SemiSyncGroup(
        session, fault_tolerance=fault_tolerance, run=run, fragments=fragments, steps_per_round=steps_per_round
    )


class SemiSyncGroup:
    """A replica group that commits a round of steps together with the others. Implements `ReplicaGroup`."""

    def __init__(
        self,
        session: ReplicaSession,
        *,
        fault_tolerance: FaultTolerance,
        run: ReplicaContext,
        fragments: list[list[str]],
        steps_per_round: int,
    ):
        self._session = session
        self._outer_weights = OuterWeights(
            run.outer_weights,
            parameters=run.parameters,
            optimizer=OUTER_OPTIMIZERS[fault_tolerance.semi_sync_method or ""],
            local_fraction=fault_tolerance.fragment_update_alpha,
        )
        self._fragments = fragments
        self._steps_per_round = steps_per_round
        self._delay_steps = fault_tolerance.fragment_sync_delay
        self._steps_in_round = 0
        self._outer_gradients: dict[str, Tensor] = {}
        self._pending: list[PendingSum] = []
        self._start_tensors: dict[str, Tensor] = {}
        self._start_metadata: Metadata = {}

    @property
    def replica_index(self) -> int:
        """Index of this group among those in the quorum."""
        return self._session.quorum.replica_index

    @property
    def num_replicas(self) -> int:
        """Number of groups in the quorum."""
        return self._session.quorum.num_replicas

    @property
    def is_writer(self) -> bool:
        """True in the first group of the quorum."""
        return self.replica_index == 0

    def begin_step(self) -> bool:
        """Forms a quorum and copies the state at the start of a round; within a round only starts the timeout."""
        session = self._session
        if not self._steps_in_round:
            if not session.quorum.join():
                return False
            session.step_timeout.start()
            self._start_tensors = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in session.recovery.tensors.items()
            }
            self._start_metadata = session.recovery.metadata()
        else:
            session.step_timeout.start()
        return True

    def sum(self, values: list[float]) -> list[float]:
        """Returns `values`: within a round a step concerns this group only."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: within a round a step concerns this group only."""

    def record_samples(self, samples: range) -> None:
        """Writes the samples to the log."""
        self._session.record_samples(samples)

    def commit(self, *, healthy: bool) -> bool:
        """Returns `healthy`: a step that is not healthy is repeated by this group. The round may be rolled back."""
        self._session.step_timeout.stop()
        return healthy

    def complete_step(self) -> bool:
        """Averages a fragment at the end of a round. Returns False if the round was rolled back."""
        session = self._session
        self._steps_in_round += 1
        names = self._fragments[session.quorum.num_committed % len(self._fragments)]
        if self._steps_in_round == self._steps_per_round - self._delay_steps:
            self._outer_gradients = {name: self._outer_weights.gradient(name) for name in names}
            self._pending = session.collectives.start_sum(self._outer_gradients.values())
        if self._steps_in_round < self._steps_per_round:
            return True
        session.collectives.finish_sum(self._pending)
        positions = session.gather_stream_positions()
        self._steps_in_round = 0
        if not session.quorum.vote():
            self._roll_back()
            return False
        session.recovery.set_stream_positions(positions)
        for name, total in self._outer_gradients.items():
            self._outer_weights.step(name, gradient=total / self.num_replicas)
        return True

    def rolled_back_steps(self) -> set[int]:
        """Returns the steps of the rounds that other groups trained again without this one."""
        size = self._steps_per_round
        rounds = self._session.log.rolled_back_steps()
        return {step for number in rounds for step in range((number - 1) * size + 1, number * size + 1)}

    def close(self) -> None:
        """Rolls back an unfinished round, which the other groups train again with all its samples, and disconnects."""
        if self._steps_in_round:
            self._roll_back()
        self._session.close()

    @torch.no_grad()
    def _roll_back(self) -> None:
        self._session.recovery.load_from_peer(self._start_metadata)
        for name, tensor in self._session.recovery.tensors.items():
            tensor.detach().copy_(self._start_tensors[name])
