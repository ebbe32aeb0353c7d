"""The interface between the trainer and other replica groups.

A *replica group* is one run of this program with a process group of its own; all of them train one model. An *attempt*
at a step that is not *committed*, because a group died or its gradient is not finite, changes nothing and is repeated.
What connects groups is a package that the core does not import, see `doors.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from torchtitan_clone import doors
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance

Metadata = dict[str, Any]
"""Training state that is not a tensor (step, data position, ...), as data that JSON can hold."""
StreamPositions = list[Any]
"""Positions in streamed data, as data that JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class RecoveryState:
    """Training state of this rank that a replica group which is behind loads from a peer."""

    tensors: Mapping[str, Tensor]
    """Local shards of parameters, optimizer state and buffers by name. Written in place: never replace them."""
    metadata: Callable[[], Metadata]
    load_from_peer: Callable[[Metadata], None]
    """Loads a peer's metadata. Called immediately before the peer's values are copied into `tensors`."""
    stream_positions: Callable[[], StreamPositions]
    set_stream_positions: Callable[[StreamPositions], None]
    """Receives, after the step, the positions of the same rank of all replica groups."""


@dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Everything that a replica group needs from the run. The callables are collectives where it says so."""

    device: torch.device
    address: str
    """Address of this machine at which other ranks and replica groups connect."""
    step: int
    """Number of steps that were committed: the last one that was trained, and those that the run gave up."""
    parameters: Mapping[str, Tensor]
    """Parameters of this rank by name; read by semi-synchronous training only."""
    names: Sequence[str]
    """Names of the parameters of the whole model, of which this rank may have a pipeline stage."""
    outer_weights: Mapping[str, Tensor]
    """State of the outer optimizer as returned by `outer_state`; empty without semi-synchronous training."""
    recovery_state: Callable[[], RecoveryState]
    sum_over_ranks: Callable[[list[float]], list[float]]
    """Sums each number over the ranks of this replica group; a collective."""
    is_run_complete: Callable[[], bool]
    """Returns True if other replica groups have finished the run. Called on rank 0, between attempts to join."""
    should_stop: Callable[[], bool]
    """Returns True if this rank was asked to stop. Called between attempts to join."""
    identity: str
    """Text that must be equal in all replica groups: the options that decide what is trained."""
    folder: Path


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


class ReplicaGroups(Protocol):
    """What a package offers that connects replica groups: `torchtitan_clone/torchft/door.py`."""

    def check_requirements(self) -> None:
        """Raises ConfigError if this machine lacks something that replica groups need."""

    def check_parameters(self, fault_tolerance: FaultTolerance, *, names: Sequence[str]) -> None:
        """Raises ConfigError if the options do not fit a model whose parameters have these names."""

    def wait_for_peers(self, *, seconds: float) -> str:
        """Returns the host where groups meet, once it answers. NoAnswerError after `seconds`, which may be inf."""
        ...

    def peers_host(self) -> str:
        """Returns the host where groups meet."""
        ...

    def outer_state(self, fault_tolerance: FaultTolerance, *, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that semi-synchronous training adds to the state of a run, by name."""
        ...

    def init_outer_weights(self, state: Mapping[str, Tensor], *, parameters: Mapping[str, Tensor]) -> None:
        """Fills those that were not loaded from a checkpoint from the weights of the model."""

    def join(self, fault_tolerance: FaultTolerance, *, run: ReplicaContext) -> ReplicaGroup:
        """Connects this rank to the place where groups meet; a collective over the ranks of the replica group."""
        ...


def replica_groups() -> ReplicaGroups:
    """Returns the package that connects replica groups; ConfigError if it is closed."""
    if (door := doors.find("torchft")) is None:
        raise ConfigError(f"fault_tolerance.enable: {doors.why_closed('torchft')}; or set it to false")
    return cast("ReplicaGroups", door)


def outer_state(fault_tolerance: FaultTolerance, *, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that semi-synchronous training adds to the state of a run, by name; else none."""
    if fault_tolerance.semi_sync_method is None or not fault_tolerance.enable:
        return {}
    return replica_groups().outer_state(fault_tolerance, parameters=parameters)


def init_outer_weights(state: Mapping[str, Tensor], *, parameters: Mapping[str, Tensor]) -> None:
    """Fills those that were not loaded from a checkpoint from the weights of the model."""
    if state:
        replica_groups().init_outer_weights(state, parameters=parameters)


def join_replica_group(fault_tolerance: FaultTolerance, *, run: ReplicaContext) -> ReplicaGroup:
    """Joins the replica groups of the run; a collective over the ranks of this one.

    Call it last in starting up: from then on the others wait for this one. Its first `begin_step` joins them.
    """
    return replica_groups().join(fault_tolerance, run=run) if fault_tolerance.enable else SingleReplica()
