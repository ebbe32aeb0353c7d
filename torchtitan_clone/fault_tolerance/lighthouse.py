"""The lighthouse: a small server at which the replica groups of a run meet."""

import os
from typing import Any

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance

TICK_MS = 50
"""How often it looks whether a quorum is complete."""


def start_lighthouse(fault_tolerance: FaultTolerance, *, port: int) -> Any:
    """Serves in a thread of this process, until `shutdown()`; port 0 takes a free one. `address()` is its URL.

    The fewest groups that it lets train are those of the run: with fewer, batches would be used up and nothing learnt.
    """
    os.environ.setdefault("RUST_LOG", "error")
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise ConfigError(['the lighthouse needs torchft: pip install "torchtitan_clone[ft]"']) from error
    return LighthouseServer(
        bind=f"[::]:{port}",
        min_replicas=fault_tolerance.min_replica_size,
        join_timeout_ms=fault_tolerance.join_timeout_ms,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=fault_tolerance.heartbeat_timeout_ms,
    )
