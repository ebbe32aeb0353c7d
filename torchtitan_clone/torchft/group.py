"""Synchronous training of several replica groups with torchft: gradients are summed over the groups in every step.

All groups form a quorum at the start of a step; a group that is behind loads the state of a peer. Gradients are summed
after backward. If that fails in any rank of a group, none of its ranks commits.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.replicas.protocol import ReplicaContext, StreamPositions
from torchtitan_clone.replicas.watchdog import StepTimeout
from torchtitan_clone.torchft.connection import warn_of_hazards
from torchtitan_clone.torchft.quorum import Quorum


class TorchFTGroup:
    """A replica group that commits every step together with the others. Implements `ReplicaGroup`.

    Building one is a collective over the ranks of the replica group.
    """

    def __init__(self, options: FaultTolerance, *, run: ReplicaContext, steps_per_commit: int = 1):
        self.recovery = run.recovery_state()
        self.quorum = Quorum(options, run=run, recovery=self.recovery, steps_per_commit=steps_per_commit)
        self._log = self.quorum.log
        self._collectives = self.quorum.collectives
        grace_seconds = 2 * self.quorum.connection.timeout.total_seconds()
        self._step_timeout = StepTimeout(factor=options.stall_factor, grace_seconds=grace_seconds)
        self._stream_positions: StreamPositions = []
        self._log.start(run.step)
        if dist.get_rank() == 0:
            warn_of_hazards(options)

    @property
    def replica_index(self) -> int:
        return self.quorum.replica_index

    @property
    def num_replicas(self) -> int:
        return self.quorum.num_replicas

    @property
    def is_writer(self) -> bool:
        return self.replica_index == 0

    def begin_step(self) -> bool:
        if not self.quorum.join():
            return False
        self._step_timeout.start()
        return True

    def sum(self, values: list[float]) -> list[float]:
        return self._collectives.sum(values)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self._collectives.start_sum(local_shard(p.grad).detach() for p in parameters if p.grad is not None)()

    def record_samples(self, samples: range) -> None:
        rows = [samples.start, samples.stop]
        self._log.write(replica_index=self.replica_index, num_replicas=self.num_replicas, rows=rows)

    def commit(self, *, healthy: bool) -> bool:
        """Votes on the step. A step that is not healthy in one group is repeated by all."""
        if not healthy:
            self.quorum.report_error(FloatingPointError("loss or gradient is not finite"))
        self._gather_stream_positions()
        self._step_timeout.stop()
        return self.quorum.vote()

    def complete_step(self) -> bool:
        """Sets the stream positions that were gathered. Returns True: a committed step is not rolled back."""
        self.recovery.set_stream_positions(self._stream_positions)
        return True

    def rolled_back_steps(self) -> set[int]:
        return self._log.rolled_back_steps(self.quorum.history)

    def close(self) -> None:
        self._log.close()
        self.quorum.connection.close()

    def _gather_stream_positions(self) -> None:
        self._stream_positions = self._collectives.gather(
            self.recovery.stream_positions(), replica_index=self.replica_index, num_replicas=self.num_replicas
        )
