"""The interface between the trainer and other replica groups.

A *replica group* is one run of this program with a process group of its own; all of them train one model. An *attempt*
at a step that is not *committed*, because a group died or its gradient is not finite, changes nothing and is repeated.
"""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Protocol

from torch import nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.context import RecoveryState as RecoveryState  # part of this interface
from torchtitan_clone.fault_tolerance.context import ReplicaContext
from torchtitan_clone.fault_tolerance.lighthouse import parse_lighthouse_address


class ReplicaGroup(Protocol):
    """One replica group as its trainer sees it.

    Every rank of a group holds one and calls the same methods in the same order::

        while group.begin_step():
            batch = loader.next_batch(replica_index=group.replica_index, num_replicas=group.num_replicas)
            group.record_samples(loader.sample_range)
            ...  # backward
            group.sum_gradients(parameters)
            if group.commit(healthy=is_finite):
                ...  # optimizer.step
                group.complete_step()
        group.close()
    """

    @property
    def replica_index(self) -> int:
        """Index of this group among those that take part in the step. Valid until the next `begin_step`."""
        ...

    @property
    def num_replicas(self) -> int:
        """Number of groups that take part in the step, among which the global batch is divided."""
        ...

    @property
    def is_writer(self) -> bool:
        """Whether this group saves checkpoints and exports weights. True in exactly one group of a quorum."""
        ...

    def begin_step(self) -> bool:
        """Waits for the other groups, and loads the state of a peer if this group is behind.

        The set of groups is fixed until the next call. Returns False if there is no step to train: other groups have
        completed the run, or this group was asked to stop while it waited.
        """
        ...

    def sum(self, values: list[float]) -> list[float]:
        """Returns each number summed over the groups. If that fails, returns `values`, and `commit` returns False."""
        ...

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the local shards of the gradients over the groups, in place. If that fails, `commit` returns False."""

    def record_samples(self, samples: range) -> None:
        """Records which samples of the global order this rank trains on in the attempt."""

    def commit(self, *, healthy: bool) -> bool:
        """Votes on the attempt, before the optimizer's step; returns whether it is committed, the same in all ranks.

        `healthy` is False if the loss or the gradients of this rank are not finite.
        """
        ...

    def complete_step(self) -> bool:
        """Ends a step, after the optimizer's step. Returns False if all state was rolled back to an earlier step."""
        ...

    def rolled_back_steps(self) -> set[int]:
        """Returns steps that this group committed but that do not count, since other groups trained them again."""
        ...

    def close(self) -> None:
        """Leaves the other groups, which continue to train. Steps that are not yet agreed upon are rolled back."""


class SingleReplica:
    """The replica group of a run without fault tolerance: every attempt is committed."""

    replica_index = 0
    num_replicas = 1
    is_writer = True

    def begin_step(self) -> bool:
        return True

    def sum(self, values: list[float]) -> list[float]:
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing: the gradients are already those of the global batch."""

    def record_samples(self, samples: range) -> None:
        """Does nothing: the samples of a step follow from its number."""

    def commit(self, *, healthy: bool) -> bool:
        return True  # a step that is not healthy counts too, as a skipped one

    def complete_step(self) -> bool:
        return True

    def rolled_back_steps(self) -> set[int]:
        return set()

    def close(self) -> None:
        """Does nothing."""


def join_replica_group(fault_tolerance: FaultTolerance, *, run: ReplicaContext) -> ReplicaGroup:
    """Connects this rank to the lighthouse; a collective over the ranks of the replica group.

    Call it last in starting up: from then on the others wait for this one. Its first `begin_step` joins them.
    """
    if not fault_tolerance.enable:
        return SingleReplica()
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported; by default it logs every quorum
    from torchtitan_clone.fault_tolerance.semi_sync import SemiSyncGroup
    from torchtitan_clone.fault_tolerance.torchft_group import TorchFTGroup

    group = TorchFTGroup if fault_tolerance.semi_sync_method is None else SemiSyncGroup
    return group(fault_tolerance, run=run)


def check_replica_requirements(fault_tolerance: FaultTolerance, *, lighthouse: str | None) -> None:
    """Raises ConfigError if this machine lacks something that replica groups need; `lighthouse` is its address."""
    if not fault_tolerance.enable:
        return
    problems = []
    if find_spec("torchft") is None:
        problems.append(
            'fault_tolerance.enable: the package torchft is not installed; run pip install "torchtitan_clone[ft]", '
            "or set it to false"
        )
    if not lighthouse:
        problems.append(
            "fault_tolerance.enable: $TORCHFT_LIGHTHOUSE is not set; start scripts/lighthouse.py and set it to the "
            "address that it prints"
        )
    else:
        parse_lighthouse_address(lighthouse)
    environment_integer("TORCHFT_MANAGER_PORT", default=0, high=65535)
    if problems:
        raise ConfigError(problems)
