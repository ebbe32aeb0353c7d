"""Private names of torchft, behind public ones that say why they are needed."""

import hashlib
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torchft
    from torchft.coordination import ManagerClient


def quorum_id(manager: "torchft.Manager") -> int:
    """Returns the number of the manager's quorum, -1 before the first. It has no public property."""
    return manager._quorum_id


class _UniquelyNumberedQuorums:
    """A manager's client whose quorum numbers do not repeat when the lighthouse restarts and counts from 1 again.

    The manager reconnects only when the number changes, and reuses keys of the store for a number that it has seen.
    """

    def __init__(self, client: "ManagerClient"):
        self._client = client
        self._quorum_of_lighthouse: list[str] = []
        self._number = -1

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def _quorum(self, *, commit_failures: int, **request: Any) -> object:
        quorum = self._client._quorum(commit_failures=commit_failures, **request)
        # All members receive the same values. The ids of the groups are new whenever one starts.
        present = [str(quorum.quorum_id), *quorum.replica_ids]
        if commit_failures or present != self._quorum_of_lighthouse:
            self._quorum_of_lighthouse = present
            text = " ".join([*present, str(quorum.max_step)])
            self._number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
        quorum.quorum_id = self._number
        return quorum


def number_quorums_uniquely(manager: "torchft.Manager") -> None:
    """Makes the numbers of the manager's quorums unique in the run: 48 bits, equal in all members, in no order."""
    manager._client = cast("ManagerClient", _UniquelyNumberedQuorums(manager._client))


def forget_failed_quorum(manager: "torchft.Manager") -> None:
    """Lets a manager start another quorum after one that failed, whose error it would raise again."""
    manager._quorum_future = None
