"""Checks that the replica groups of a quorum train the same run, under different replica ids."""

import hashlib

from torchtitan_clone.fault_tolerance.collectives import ReplicaCollectives
from torchtitan_clone.fault_tolerance.recovery import ReplicaMismatchError


class IdentityCheck:
    """Compares this replica group with the others, once per quorum.

    `identity` must be equal in all groups, `replica_id` different. `started`, the time at which this group started,
    must be equal in all its ranks, so that they decide the same.
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

        ReplicaMismatchError if it is this group that must leave: the one that has just joined or, of two members with
        the same id, the older one. The lighthouse has taken it for dead, and the newer one has replaced it.
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
