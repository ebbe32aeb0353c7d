"""Which steps the state of a replica group results from, so that groups compare more than the number of their steps.

A quorum commits a step once, so a step is identified by its number and its quorum. Two groups that trained apart, for
example with two lighthouses, have the same numbers and different quorums. With semi-synchronous training the unit is a
round of steps.
"""

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter

from torchtitan_clone.documents import Value

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
