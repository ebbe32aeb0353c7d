"""Which replica groups may train together: their histories, what they record, and how members of a quorum are judged.

A quorum commits a step once, so a step is identified by its number and its quorum. Two groups that trained apart, for
example with two lighthouses, have the same numbers and different quorums. With semi-synchronous training the unit is a
round of steps.

    step             1    2    3    4    5    6
    history of A     q1   q1   q1   q2   q2        quorums ((1, q1), (4, q2)), length 5
    history of B     q1   q1   q1   q3             first difference 4: B gives up step 4 for A's
    history of C     q1   q1                       A's contains it: C receives A's state

All members see the same table, so all of them reach the same decision.
"""

import errno
import fcntl
import hashlib
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TextIO

import torchft

from torchtitan_clone.documents import DocumentError, Value, open_regular, parse_json
from torchtitan_clone.observe.records import append_record
from torchtitan_clone.torchft.connection import ReplicaCollectives, ReplicaMismatchError
from torchtitan_clone.torchft.torch_compat import quorum_id

MAX_CHANGES = 1000
"""Changes of the quorum that are remembered, about 25 bytes each in every message between groups."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The quorum of each committed step from `start` + 1 to `length`; earlier ones came from a checkpoint."""

    created: float
    """When the first of the groups that began it started, in seconds since the epoch."""
    start: int
    length: int
    quorums: tuple[tuple[int, int], ...] = ()
    """First step and quorum of each sequence of steps that one quorum committed, ascending."""

    @classmethod
    def parse(cls, value: Value) -> "History":
        """Returns the history that `to_json` has written. DocumentError if it is not one."""
        entries = value.table("created", "start", "length", "quorums")
        pairs = (pair.integers(count=2) for pair in entries["quorums"].items())
        return cls(
            created=entries["created"].number(),
            start=entries["start"].integer(),
            length=entries["length"].integer(),
            quorums=tuple((first, quorum) for first, quorum in pairs),
        )

    def to_json(self) -> dict[str, object]:
        """Returns the history as data that JSON can hold."""
        return {**vars(self), "quorums": [list(pair) for pair in self.quorums]}

    def after_commit(self, quorum: int) -> "History":
        """Returns the history with one more step, which this quorum has committed."""
        number = self.length + 1
        is_same = bool(self.quorums) and self.quorums[-1][1] == quorum
        quorums = self.quorums if is_same else (*self.quorums, (number, quorum))
        kept = quorums[-MAX_CHANGES:]
        start = self.start if kept == quorums else kept[0][0] - 1
        return History(created=self.created, start=start, length=number, quorums=kept)

    def quorum_of(self, number: int) -> int | None:
        """Returns the quorum that committed the step, or None if this is not known."""
        if not self.start < number <= self.length:
            return None
        position = bisect_right(self.quorums, number, key=itemgetter(0))
        return self.quorums[position - 1][1] if position else None

    def first_difference(self, other: "History") -> int | None:
        """Returns the first step that two quorums committed; None if one history continues the other, as far as known.

        1 if the histories have no step in common.
        """
        low = max(self.start, other.start) + 1
        high = min(self.length, other.length)
        changes = {low, *(first for first, _ in self.quorums + other.quorums if first > low)}
        known = sorted(number for number in changes if number <= high)
        return next((number for number in known if self.quorum_of(number) != other.quorum_of(number)), None)


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


TAIL_BYTES = 1 << 20
"""How much of the end of each log is read, some thousand steps."""
LOCK_FILE = "running.lock"
"""Locked by rank 0 while the group runs; the lock ends with the process, whatever ends it."""
LOCK_ATTEMPTS = 10
"""The lock is held for a moment by a group that looks whether it is free."""


class AttemptLog:
    """Appends to rows.rank*.jsonl in the folder of this replica group."""

    def __init__(self, folder: Path, *, rank: int, manager: torchft.Manager):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._manager = manager
        self._file = folder / f"rows.rank{rank}.jsonl"
        self._lock = (folder / LOCK_FILE).open("a") if rank == 0 else None

    def start(self, step: int) -> None:
        """Records that the group starts after this step and, until the process ends, that it runs."""
        self.write(started=step)
        for _ in range(LOCK_ATTEMPTS):
            if self._lock is None or _try_lock(self._lock) is None:
                break
            time.sleep(0.05)

    def write(self, **values: object) -> None:
        """Appends these values, the step that is attempted, its quorum, and the time; a full disk loses the line."""
        step = self._manager.current_step() + (0 if values.get("committed") else 1)
        row = {"step": step, "quorum": quorum_id(self._manager), "time": time.time()} | values
        append_record(self._file, row)

    def rolled_back_steps(self, history: History) -> set[int]:
        """Returns the recent steps (TAIL_BYTES) of this group that `history`, its present one, does not contain.

        Of steps before the history, those that other groups committed again later, in another quorum.
        """
        own_quorums: dict[int, int] = {}
        latest: dict[int, tuple[float, int]] = {}
        for folder in self._folder.parent.glob("replica-*"):
            for row in _recent_rows(folder):
                if "committed" in row.keys:
                    attempt = (row.time, row.quorum)
                    latest[row.step] = max(attempt, latest.get(row.step, attempt))
                    if folder == self._folder:
                        own_quorums[row.step] = row.quorum
        return {step for step, quorum in own_quorums.items() if quorum != (history.quorum_of(step) or latest[step][1])}

    def running_groups(self) -> list[tuple[int, int]]:
        """Returns the other groups of this folder that run, and the last step that each has committed or received."""
        folders = [each for each in self._folder.parent.glob("replica-*") if each != self._folder and _is_running(each)]
        return [(int(each.name.removeprefix("replica-")), _last_step(each)) for each in folders]

    def close(self) -> None:
        if self._lock:
            self._lock.close()


def _try_lock(file: TextIO) -> int | None:
    """Locks the file; returns the error's number if it cannot, EACCES or EAGAIN if another process has locked it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno


def _is_running(folder: Path) -> bool:
    """Returns whether the group of this folder holds its lock; False if that cannot be found out."""
    if not folder.name.removeprefix("replica-").isdecimal():
        return False
    try:
        with (folder / LOCK_FILE).open("r+") as file:
            return _try_lock(file) in (errno.EACCES, errno.EAGAIN)
    except OSError:  # it has never run, or with another version
        return False


def _last_step(folder: Path) -> int:
    """Returns the last step of the group's present start; 0 if it has none yet."""
    last = 0
    for row in _recent_rows(folder):
        if "started" in row.keys:
            last = 0
        elif "committed" in row.keys:
            last = row.step
        elif "healed" in row.keys:
            last = row.step - 1  # it attempts the next one
    return last


@dataclass(frozen=True, kw_only=True)
class _Row:
    step: int
    quorum: int
    time: float
    keys: Collection[str]
    """Keys of the row whose value is not false; of 0 too."""


def _recent_rows(folder: Path) -> Iterator[_Row]:
    """Yields the recent lines of rank 0; skips incomplete ones, and a file that cannot be read."""
    try:
        with open_regular(folder / "rows.rank0.jsonl") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.readall().splitlines()
    except (OSError, DocumentError):
        return
    for line in lines:
        try:
            entries = parse_json(line, where=f"{folder.name}/rows.rank0.jsonl").entries()
            yield _Row(
                step=entries["step"].integer(),
                quorum=entries["quorum"].integer(low=-1),
                time=entries["time"].number(),
                keys=[key for key, value in entries.items() if value.value is not False],
            )
        except (DocumentError, KeyError):
            continue
