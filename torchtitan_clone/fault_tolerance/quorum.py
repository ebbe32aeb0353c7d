"""The quorum of a replica group: which groups take part in an attempt, recovery from a peer, and the commit vote."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
import torchft

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.collectives import ReplicaCollectives
from torchtitan_clone.fault_tolerance.connection import Connection
from torchtitan_clone.fault_tolerance.context import Metadata, RecoveryState, ReplicaContext
from torchtitan_clone.fault_tolerance.recovery import STATE_KEY, ReplicaMismatchError
from torchtitan_clone.torch_compat import forget_failed_quorum, quorum_id

logger = logging.getLogger("torchtitan_clone")

RETRY_SECONDS = 0.2
"""Pause before another quorum is requested where the last one had too few groups."""
TAIL_BYTES = 1 << 20
"""How much of the end of each log is read, some thousand steps, to find steps that were rolled back."""


class AttemptLog:
    """Appends to rows.rank*.jsonl in the folder of this replica group."""

    def __init__(self, folder: Path, *, rank: int, manager: torchft.Manager):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._manager = manager
        self._file = (folder / f"rows.rank{rank}.jsonl").open("a", buffering=1)

    def write(self, **values: object) -> None:
        """Appends a line with these values, the step that is being attempted, its quorum, and the time."""
        step = self._manager.current_step() + (0 if values.get("committed") else 1)
        row = {"step": step, "quorum": quorum_id(self._manager), "time": time.time()} | values
        self._file.write(json.dumps(row) + "\n")

    def rolled_back_steps(self) -> set[int]:
        """Returns the recent steps (TAIL_BYTES) that other groups committed again later, in another quorum."""
        own_quorums: dict[int, int] = {}
        latest: dict[int, tuple[float, int]] = {}
        for file in self._folder.parent.glob("replica-*/rows.rank0.jsonl"):
            for step, seconds, quorum in _committed_attempts(file):
                latest[step] = max((seconds, quorum), latest.get(step, (seconds, quorum)))
                if file.parent == self._folder:
                    own_quorums[step] = quorum
        return {step for step, quorum in own_quorums.items() if latest[step][1] != quorum}

    def close(self) -> None:
        self._file.close()


def _committed_attempts(file: Path) -> Iterator[tuple[int, float, int]]:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        for line in stream.read().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # an incomplete line
                continue
            if isinstance(row, dict) and row.get("committed"):
                yield row["step"], row["time"], row["quorum"]


class IdentityCheck:
    """Compares this replica group with the others, once per quorum.

    `identity` must be equal in all groups, `replica_id` different. `started` must be equal in all ranks of a group.
    """

    def __init__(self, *, identity: str, replica_id: int, started: float):
        self._digest = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=5).digest())
        self._replica_id = replica_id
        self._started = started
        self._checked_quorum = -1

    def check(
        self, collectives: ReplicaCollectives, *, quorum: int, replica_index: int, num_replicas: int
    ) -> Exception | None:
        """Returns why the groups cannot train together, or None; a collective over the groups.

        ReplicaMismatchError if this group must leave: it has just joined or, of two members with the same id, is the
        older one, which the lighthouse considered dead and the newer one has replaced.
        """
        if quorum == self._checked_quorum:
            return None
        is_new = self._checked_quorum == -1
        priority = -self._started if is_new else self._started  # members of the run before those that join
        own = [self._digest, self._replica_id, priority]
        table = collectives.sum([float(v * (replica_index == index)) for index in range(num_replicas) for v in own])
        if (failure := collectives.error()) is not None:
            return failure
        ids = table[1::3]
        if len(set(table[::3])) > 1:
            problem = (
                "replica groups were started with different options of model, training or optimizer; start all of "
                "them with the same configuration"
            )
            must_leave = is_new
        elif len(set(ids)) < num_replicas:
            problem = (
                f"two replica groups have the same fault_tolerance.replica_id: {sorted(map(int, ids))}; start each "
                "group with an id of its own"
            )
            same_id = [p for p, other in zip(table[2::3], ids, strict=True) if other == self._replica_id]
            must_leave = priority < max(same_id)
        else:
            self._checked_quorum = quorum
            return None
        if must_leave:
            raise ReplicaMismatchError(problem)
        return ReplicaMismatchError(problem)


class Quorum:
    """Forms a quorum with the other groups for every attempt at `steps_per_commit` steps, and votes on its commit.

    All ranks of a replica group call the same methods in the same order; building one is a collective.
    """

    def __init__(self, options: FaultTolerance, *, run: ReplicaContext, recovery: RecoveryState, steps_per_commit: int):
        self.connection = Connection(options, recovery=recovery, device=run.device, address=run.address)
        self._manager = self.connection.manager
        self.collectives = ReplicaCollectives(self._manager, device=self.connection.device)
        self.log = AttemptLog(run.folder, rank=dist.get_rank(), manager=self._manager)
        self.replica_index = self.num_replicas = 0
        self._min_replicas = options.min_replica_size
        self._run = run
        self._recovery = recovery
        self._steps_per_commit = steps_per_commit
        self._metadata: Metadata = {}
        self._received: Metadata | None = None
        self._reset_to(run.step // steps_per_commit)
        (started,) = run.sum_over_ranks([time.time()])  # equal in all ranks
        self._identity = IdentityCheck(identity=run.identity, replica_id=options.replica_id, started=started)
        self._manager.register_state_dict_fn(STATE_KEY, self._receive_metadata, lambda: self._metadata)

    @property
    def num_committed(self) -> int:
        return self._manager.current_step()

    def join(self) -> bool:
        """Joins the other groups for an attempt, with retries, and loads the state of a peer if this group is behind.

        Returns False if meanwhile the run was completed by others, or this group was asked to stop.
        """
        reported = None
        num_committed = self.num_committed
        while True:
            error = self._try_to_join()
            is_complete = error is not None and dist.get_rank() == 0 and self._run.is_run_complete()
            failed, stop, complete = self._run.sum_over_ranks([error is not None, self._run.should_stop(), is_complete])
            if not failed:
                break
            if stop or complete:
                return False
            if error is not None and str(error) != reported:
                reported = str(error)
                logger.warning("waiting for replica groups: %s", reported.splitlines()[0])
            self._reset_to(num_committed)
            self._leave(error)
        if self._received is not None:
            self._load_received(self._received)
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
            return error
        replica_index, num_replicas = self._members()
        if num_replicas < self._min_replicas:
            time.sleep(RETRY_SECONDS)
            return RuntimeError(
                f"{num_replicas} in the quorum, but fault_tolerance.min_replica_size = {self._min_replicas}; the "
                "lighthouse was started with a smaller minimum"
            )
        return self._identity.check(
            self.collectives, quorum=quorum_id(self._manager), replica_index=replica_index, num_replicas=num_replicas
        )

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
        if dist.get_rank() == 0:
            logger.info("healed from another replica group: step %d", self.num_committed * self._steps_per_commit)

    def _update_membership(self) -> None:
        replica_index, num_replicas = self._members()
        changed = (replica_index, num_replicas) != (self.replica_index, self.num_replicas)
        if changed and dist.get_rank() == 0:
            step = self.num_committed * self._steps_per_commit + 1
            logger.info("step %d: %d replica groups, this one is %d", step, num_replicas, replica_index)
        self.replica_index = replica_index
        self.num_replicas = num_replicas
