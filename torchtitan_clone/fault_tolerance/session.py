"""The session of a rank with the other replica groups: what synchronous and semi-synchronous training both use."""

import torch.distributed as dist

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.attempt_log import AttemptLog
from torchtitan_clone.fault_tolerance.collectives import ReplicaCollectives
from torchtitan_clone.fault_tolerance.connection import connect, warn_of_hazards
from torchtitan_clone.fault_tolerance.context import ReplicaContext, StreamPositions
from torchtitan_clone.fault_tolerance.quorum import Quorum
from torchtitan_clone.fault_tolerance.watchdog import StepTimeout


class ReplicaSession:
    """Connects a rank to the other replica groups and holds what it needs to train with them.

    Building one is a collective over the ranks of the replica group. `steps_per_commit` is the number of steps that
    are committed together.
    """

    def __init__(self, fault_tolerance: FaultTolerance, *, run: ReplicaContext, steps_per_commit: int = 1):
        self.recovery = run.recovery_state()
        self._connection = connect(fault_tolerance, recovery=self.recovery, device=run.device)
        manager = self._connection.manager
        self.step_timeout = StepTimeout(
            factor=fault_tolerance.stall_factor, grace_seconds=2 * self._connection.timeout.total_seconds()
        )
        self.log = AttemptLog(run.folder, rank=dist.get_rank(), manager=manager)
        self.collectives = ReplicaCollectives(manager, device=self._connection.device)
        self.quorum = Quorum(
            fault_tolerance,
            run=run,
            recovery=self.recovery,
            connection=self._connection,
            collectives=self.collectives,
            log=self.log,
            steps_per_commit=steps_per_commit,
        )
        self.log.write(started=run.step)
        if self._connection.is_first_rank:
            warn_of_hazards(fault_tolerance)

    def record_samples(self, samples: range) -> None:
        """Writes which samples this rank trains on to the log."""
        self.log.write(
            replica_index=self.quorum.replica_index,
            num_replicas=self.quorum.num_replicas,
            rows=[samples.start, samples.stop],
        )

    def gather_stream_positions(self) -> StreamPositions:
        """Returns the stream positions of this rank in all replica groups; a collective between the groups."""
        return self.collectives.gather(
            self.recovery.stream_positions(),
            replica_index=self.quorum.replica_index,
            num_replicas=self.quorum.num_replicas,
        )

    def close(self) -> None:
        """Disconnects; the other groups continue."""
        self.log.close()
        self._connection.manager.shutdown(wait=False)
