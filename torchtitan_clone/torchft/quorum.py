"""The quorum of a replica group: which groups take part in an attempt, recovery from a peer, and the commit vote."""

import logging
import os
import time
from dataclasses import replace

import torch.distributed as dist

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.replicas.protocol import Metadata, RecoveryState, ReplicaContext
from torchtitan_clone.torchft.connection import STATE_KEY, Connection, ReplicaCollectives, ReplicaMismatchError
from torchtitan_clone.torchft.members import AttemptLog, GiveUpStepsError, History, MemberCheck, newest_history
from torchtitan_clone.torchft.torch_compat import forget_failed_quorum, number_quorums_uniquely, quorum_id

logger = logging.getLogger("torchtitan_clone")

RETRY_SECONDS = 0.2
"""Pause before another quorum is requested where the last one cannot train."""


class Quorum:
    """Forms a quorum with the other groups for every attempt at `steps_per_commit` steps, and votes on its commit.

    All ranks of a replica group call the same methods in the same order; building one is a collective.
    """

    def __init__(self, options: FaultTolerance, *, run: ReplicaContext, recovery: RecoveryState, steps_per_commit: int):
        self.connection = Connection(options, recovery=recovery, device=run.device, address=run.address)
        self._manager = self.connection.manager
        number_quorums_uniquely(self._manager)
        self.collectives = ReplicaCollectives(self._manager, device=self.connection.device)
        self.log = AttemptLog(run.folder, rank=dist.get_rank(), manager=self._manager)
        self.replica_index = self.num_replicas = 0
        self._min_replicas = options.min_replica_size
        self._run = run
        self._recovery = recovery
        self._steps_per_commit = steps_per_commit
        self._metadata: Metadata = {}
        self._received: Metadata | None = None
        (started,) = run.sum_over_ranks([time.time() * (dist.get_rank() == 0)])  # equal in all ranks
        num_committed = run.step // steps_per_commit
        self.history = History(created=started, start=num_committed, length=num_committed)
        self._gives_up = False
        self._reset_to(num_committed)
        self._check = MemberCheck(
            identity=run.identity,
            replica_id=options.replica_id,
            started=started,
            group_size=options.group_size,
            patience_seconds=options.heartbeat_timeout_ms / 1000,
            unit=steps_per_commit,
        )
        self._manager.register_state_dict_fn(STATE_KEY, self._receive_metadata, lambda: self._metadata)

    @property
    def num_committed(self) -> int:
        return self._manager.current_step()

    def join(self) -> bool:
        """Joins the other groups for an attempt, with retries, and loads the state of a peer if this group is behind.

        Returns False if meanwhile the run was completed by others, or this group was asked to stop.
        """
        reported = None
        while True:
            error = self._try_to_join()
            # A group that comes back alone gets a quorum at once.
            may_be_complete = dist.get_rank() == 0 and (error is not None or self._check.has_new_quorum)
            is_complete = may_be_complete and self._run.is_run_complete()
            gives_up = isinstance(error, GiveUpStepsError)
            failed, stop, complete, gives_up = self._run.sum_over_ranks(
                [error is not None, self._run.should_stop(), is_complete, gives_up]
            )
            if complete or (failed and stop):
                return False
            if not failed:
                break
            if error is not None and str(error) != reported:
                reported = str(error)
                logger.warning("waiting for replica groups: %s", reported.splitlines()[0])
            self._gives_up = gives_up > 0
            self._reset_to(self.history.length - self._gives_up)  # torchft recovers only groups with fewer steps
            self._leave(error)
        if self._received is not None:
            self._load_received(self._received)
        self._gives_up = False
        # Groups that begin a run together have the same beginning.
        self.history = replace(self.history, created=newest_history(self._check.members).created)
        self._update_membership()
        return True

    def report_error(self, error: Exception) -> None:
        """Makes this rank vote against the attempt, and skips its remaining collectives."""
        self._manager.report_error(error)

    def vote(self) -> bool:
        """Returns whether the attempt is committed: no rank of this group reports an error. A collective over it."""
        if (error := self.collectives.error()) is not None:
            self._abort_collectives(error)
        committed = self._manager.should_commit(timeout=3 * self.connection.timeout)
        if committed:
            self.history = self.history.after_commit(quorum_id(self._manager))
        self.log.write(committed=committed, **({} if error is None else {"error": str(error)[:200]}))
        if not committed and dist.get_rank() == 0:
            logger.warning("the step is repeated: %s", str(error or "a rank failed")[:200])
        return committed

    def _try_to_join(self) -> Exception | None:
        self._metadata = self._recovery.metadata()
        try:
            self._manager.start_quorum()
        except TimeoutError:
            forget_failed_quorum(self._manager)
            address = os.environ["TORCHFT_LIGHTHOUSE"]
            return TimeoutError(f"the lighthouse at {address} does not answer, or too few replica groups are running")
        except RuntimeError as error:
            forget_failed_quorum(self._manager)
            return error
        if (error := self.collectives.error()) is not None:
            if isinstance(error, ReplicaMismatchError):
                raise error
            if isinstance(error, OSError):  # refused at once: the group is still alive to the lighthouse
                time.sleep(RETRY_SECONDS)
            return error
        error = self._check_members()
        if error is not None:
            time.sleep(RETRY_SECONDS)
        return error

    def _check_members(self) -> Exception | None:
        replica_index, num_replicas = self._members()
        if num_replicas < self._min_replicas:
            return RuntimeError(
                f"{num_replicas} in the quorum, but fault_tolerance.min_replica_size = {self._min_replicas}; the "
                "lighthouse was started with a smaller minimum"
            )
        running = self.log.running_groups() if self._check.is_new else []
        own = self._check.describe(history=self.history, gives_up=self._gives_up, running=running)
        quorum = quorum_id(self._manager)
        error = self._check.check(
            self.collectives, own=own, quorum=quorum, replica_index=replica_index, num_replicas=num_replicas
        )
        if error is not None:
            return error
        expected = self.history if self._received is None else newest_history(self._check.members)
        if self.num_committed != expected.length:
            return RuntimeError("the replica group whose steps this one was to receive is gone")
        return None

    def _members(self) -> tuple[int, int]:
        replica_index = self._manager.participating_rank()
        assert replica_index is not None
        return replica_index, self._manager.num_participants()

    def _leave(self, error: Exception | None) -> None:
        self.log.write(left=str(error or "another rank failed")[:200])
        self._manager.report_error(error or RuntimeError("another rank of this replica group failed"))
        self._abort_collectives(error)
        self._manager.should_commit(timeout=2 * self.connection.timeout)

    def _abort_collectives(self, error: Exception | None) -> None:
        if error is not None:
            # The frames of the traceback reference the collective's work, which keeps the connections open.
            error.__traceback__ = error.__context__ = None
        self.connection.process_group.abort()

    def _receive_metadata(self, metadata: Metadata) -> None:
        self._received = metadata  # until all ranks of this group have received theirs

    def _reset_to(self, num_committed: int) -> None:
        """Discards what was received: another rank of this group has failed, and the ranks must not diverge."""
        self._received = None
        self._manager.load_state_dict({"step": num_committed, "batches_committed": 0})

    def _load_received(self, metadata: Metadata) -> None:
        self._recovery.load_from_peer(metadata)
        self.connection.transport.copy_received()
        self._received = None
        self._take_over(newest_history(self._check.members))
        if dist.get_rank() == 0:
            logger.info("healed from another replica group: step %d", self.num_committed * self._steps_per_commit)

    def _take_over(self, history: History) -> None:
        lost = self.history.first_difference(history)
        if lost is not None and dist.get_rank() == 0:
            first, last = (lost - 1) * self._steps_per_commit + 1, self.history.length * self._steps_per_commit
            logger.warning("steps %d to %d are given up: the other replica groups have trained them again", first, last)
        self.history = history
        self.log.write(healed=history.length)

    def _update_membership(self) -> None:
        replica_index, num_replicas = self._members()
        changed = (replica_index, num_replicas) != (self.replica_index, self.num_replicas)
        if changed and dist.get_rank() == 0:
            step = self.num_committed * self._steps_per_commit + 1
            logger.info("step %d: %d replica groups, this one is %d", step, num_replicas, replica_index)
        self.replica_index = replica_index
        self.num_replicas = num_replicas
