"""What a replica group needs from a run, for tests that train without a Trainer."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_clone.replicas.protocol import Metadata, RecoveryState, ReplicaContext


def replica_context(
    parameters: Mapping[str, Tensor],
    *,
    folder: Path,
    outer_weights: Mapping[str, Tensor] | None = None,
    metadata: Callable[[], Metadata] = dict,
    load_from_peer: Callable[[Metadata], None] = lambda _: None,
    is_run_complete: bool = False,
) -> ReplicaContext:
    """Returns the context of a rank that is alone in its replica group, at step 0."""
    outer = outer_weights or {}
    recovery_state = RecoveryState(
        tensors={**parameters, **outer},
        metadata=metadata,
        load_from_peer=load_from_peer,
        stream_positions=list,
        set_stream_positions=lambda _: None,
    )
    return ReplicaContext(
        device=torch.device("cpu"),
        address="127.0.0.1",
        step=0,
        parameters=parameters,
        names=list(parameters),
        outer_weights=outer,
        recovery_state=lambda: recovery_state,
        sum_over_ranks=lambda values: values,
        is_run_complete=lambda: is_run_complete,
        should_stop=lambda: False,
        identity="",
        folder=folder,
    )
