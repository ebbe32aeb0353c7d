"""Which replica groups may train together: what the members of a new quorum tell each other, and how it is judged.

All members see the same table, so all of them reach the same decision.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.torchft.collectives import ReplicaCollectives
from torchtitan_clone.torchft.history import History
from torchtitan_clone.torchft.recovery import ReplicaMismatchError


class GiveUpStepsError(Exception):
    """This group has as many steps as another one but not the same, and must receive the state of the other."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a replica group tells the others when a quorum is formed."""

    identity: str
    """Digest of the options that must be equal in all groups."""
    replica_id: int
    started: float
    """In seconds since the epoch, equal in all ranks of a group."""
    is_new: bool
    """Whether the group has not been in a quorum that trained since it started."""
    has_waited: bool
    """Whether a new group has waited long enough for others that may be running."""
    gives_up: bool
    """Whether the group discards its steps for those of a group with as many."""
    history: History
    running: Sequence[tuple[int, int]]
    """Groups that run according to the folder of the run: replica_id and last step. Of new groups only."""

    @classmethod
    def parse(cls, value: Value) -> "Member":
        """Returns the member that `to_json` describes. DocumentError if it describes none."""
        keys = ("identity", "replica_id", "started", "is_new", "has_waited", "gives_up", "history", "running")
        entries = value.table(*keys)
        running = (pair.integers(count=2) for pair in entries["running"].items())
        return cls(
            identity=entries["identity"].text(),
            replica_id=entries["replica_id"].integer(),
            started=entries["started"].number(),
            is_new=entries["is_new"].flag(),
            has_waited=entries["has_waited"].flag(),
            gives_up=entries["gives_up"].flag(),
            history=History.parse(entries["history"]),
            running=[(replica_id, step) for replica_id, step in running],
        )

    def to_json(self) -> dict[str, object]:
        """Returns the member as data that JSON can hold."""
        return {**vars(self), "history": self.history.to_json(), "running": [list(pair) for pair in self.running]}


def newest_history(members: Sequence[Member]) -> History:
    """Returns the longest history; of several with this length the oldest."""
    kept = [member.history for member in members if not member.gives_up] or [members[0].history]
    return max(kept, key=lambda each: (each.length, -each.created, each.quorums))


def find_mismatch(members: Sequence[Member], *, own: Member) -> Exception | None:
    """Returns why the groups do not belong together, or None.

    Raises it instead, as ReplicaMismatchError, if this group must leave: it has just joined or, of two members with the
    same id, is the older one, which the lighthouse considered dead and the newer one has replaced.
    """
    ids = sorted(member.replica_id for member in members)
    if len({member.identity for member in members}) > 1:
        problem = (
            "replica groups were started with different options of model, data, optimizer, mesh or fragments, or with "
            "another global batch size; start all of them with the same configuration and the same number of ranks"
        )
        must_leave = own.is_new
    elif len(set(ids)) < len(ids):
        problem = (
            f"two replica groups have the same fault_tolerance.replica_id: {ids}; start each group with an id of its "
            "own"
        )
        same = [_priority(member) for member in members if member.replica_id == own.replica_id]
        must_leave = _priority(own) < max(same)
    else:
        return None
    if must_leave:
        raise ReplicaMismatchError(problem)
    return ReplicaMismatchError(problem)


def _priority(member: Member) -> float:
    return -member.started if member.is_new else member.started  # members of the run before those that join


def find_conflict(members: Sequence[Member], *, own: Member, unit: int) -> Exception | None:
    """Returns why the histories of the groups do not allow them to train together, or None; `unit` is steps per commit.

    A group whose steps the longest history does not contain gives them up; unless it is the older of two groups that
    have no step in common, one of which has trained the run anew: that is for a person to decide.
    """
    newest = newest_history(members)
    if any(member.gives_up and member.history.length > newest.length for member in members):
        return RuntimeError("the replica group with the steps that others give theirs up for is gone")
    losers = [each for each in members if not each.gives_up and each.history.first_difference(newest) is not None]
    for member in losers:
        if member.history.first_difference(newest) == 1 and member.history.created < newest.created:
            (other,) = [each.replica_id for each in members if each.history is newest][:1]
            return RuntimeError(
                f"replica group {other} has trained the run anew from step 1 to {newest.length * unit}, without the "
                f"steps 1 to {member.history.length * unit} of replica group {member.replica_id}; end the one whose "
                "steps may be lost and start it again"
            )
    tied = [member for member in losers if member.history.length == newest.length]
    if own in tied:
        return GiveUpStepsError(f"another replica group has an older history of {newest.length * unit} steps")
    return RuntimeError(f"replica group {tied[0].replica_id} gives up its steps") if tied else None


def find_premature_start(members: Sequence[Member], *, group_size: int, unit: int) -> Exception | None:
    """Returns why groups that have all just started must not train yet, or None: others may have newer steps."""
    if not all(member.is_new for member in members):
        return None
    present = {member.replica_id for member in members}
    length = newest_history(members).length
    for replica_id, step in (pair for member in members for pair in member.running):
        if replica_id not in present and step > length:
            return RuntimeError(
                f"replica group {replica_id} is running and has committed step {step * unit}, but does not answer; if "
                f"it hangs, end it to continue after step {length * unit}"
            )
    if len(members) < group_size and not any(member.has_waited for member in members):
        return RuntimeError(
            f"{len(members)} of fault_tolerance.group_size = {group_size} have started; others that run already have "
            "fault_tolerance.heartbeat_timeout_ms to answer"
        )
    return None


class MemberCheck:
    """Compares this replica group with the others, once per quorum.

    `identity` must be equal in all groups, `replica_id` different. `started` must be equal in all ranks of a group.
    """

    def __init__(
        self, *, identity: str, replica_id: int, started: float, group_size: int, patience_seconds: float, unit: int
    ):
        self._digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self._replica_id = replica_id
        self._started = started
        self._group_size = group_size
        self._patience_seconds = patience_seconds
        self._unit = unit
        self._first_quorum_time: float | None = None
        self._checked_quorum = -1
        self.has_new_quorum = False
        """Whether the last check found another quorum than the one before."""
        self.members: Sequence[Member] = []
        """Members of the last quorum that may train together."""

    @property
    def is_new(self) -> bool:
        """Whether no quorum has passed the check yet."""
        return self._checked_quorum == -1

    def describe(self, *, history: History, gives_up: bool, running: Sequence[tuple[int, int]]) -> Member:
        """Returns what this group tells the others."""
        now = time.monotonic()
        self._first_quorum_time = self._first_quorum_time or now
        return Member(
            identity=self._digest,
            replica_id=self._replica_id,
            started=self._started,
            is_new=self.is_new,
            has_waited=now - self._first_quorum_time > self._patience_seconds,
            gives_up=gives_up,
            history=history,
            running=running,
        )

    def check(
        self, collectives: ReplicaCollectives, *, own: Member, quorum: int, replica_index: int, num_replicas: int
    ) -> Exception | None:
        """Returns why the groups cannot train together, or None; a collective over the groups.

        ReplicaMismatchError if this group must leave.
        """
        self.has_new_quorum = quorum != self._checked_quorum
        if not self.has_new_quorum:
            return None
        rows = collectives.gather([own.to_json()], replica_index=replica_index, num_replicas=num_replicas)
        if (failure := collectives.error()) is not None:
            return failure
        try:
            members = [Member.parse(Value(row, where=f"replica group {index}")) for index, row in enumerate(rows)]
        except DocumentError as error:
            return error
        if len(members) != num_replicas:
            return RuntimeError(f"{len(members)} of {num_replicas} replica groups have described themselves")
        own = members[replica_index]
        problem = (
            find_mismatch(members, own=own)
            or find_conflict(members, own=own, unit=self._unit)
            or find_premature_start(members, group_size=self._group_size, unit=self._unit)
        )
        if problem is None:
            self._checked_quorum = quorum
            self.members = members
        return problem
