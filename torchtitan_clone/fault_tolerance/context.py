"""What a replica group needs to know about its run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    """Last step that was trained."""
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
