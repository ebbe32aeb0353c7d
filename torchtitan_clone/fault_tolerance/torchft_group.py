"""Synchronous training of several replica groups with torchft: gradients are summed over the groups in every step.

All groups form a quorum at the start of a step, so that its samples can be divided among those that are running; a
group that is behind loads the state of a peer. No group joins before the next step. Gradients are summed after
backward. If that fails in any rank of a group, none of its ranks commits.
"""

from collections.abc import Iterable

from torch import nn

from torchtitan_clone.fault_tolerance.context import StreamPositions
from torchtitan_clone.fault_tolerance.session import ReplicaSession
from torchtitan_clone.ops.dtensor_shards import local_shard


class TorchFTGroup:
    """A replica group that commits every step together with the others. Implements `ReplicaGroup`."""

    def __init__(self, session: ReplicaSession):
        self._session = session
        self._stream_positions: StreamPositions = []

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
        """Forms a quorum with the other groups and starts the step's timeout."""
        if not self._session.quorum.join():
            return False
        self._session.step_timeout.start()
        return True

    def sum(self, values: list[float]) -> list[float]:
        """Sums each number over the groups."""
        return self._session.collectives.sum(values)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the local shards of the gradients over the groups, in buckets."""
        gradients = [local_shard(p.grad).detach() for p in parameters if p.grad is not None]
        self._session.collectives.finish_sum(self._session.collectives.start_sum(gradients))

    def record_samples(self, samples: range) -> None:
        """Writes the samples to the log."""
        self._session.record_samples(samples)

    def commit(self, *, healthy: bool) -> bool:
        """Votes on the step. A step that is not healthy in one group is repeated by all."""
        if not healthy:
            self._session.quorum.report_error(FloatingPointError("loss or gradient is not finite"))
        self._stream_positions = self._session.gather_stream_positions()
        self._session.step_timeout.stop()
        return self._session.quorum.vote()

    def complete_step(self) -> bool:
        """Sets the stream positions that were gathered. Returns True: a committed step is not rolled back."""
        self._session.recovery.set_stream_positions(self._stream_positions)
        return True

    def rolled_back_steps(self) -> set[int]:
        """Returns the steps that other groups trained again without this one."""
        return self._session.log.rolled_back_steps()

    def close(self) -> None:
        """Disconnects from the other groups."""
        self._session.close()
