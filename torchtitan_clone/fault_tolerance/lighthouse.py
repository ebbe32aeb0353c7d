"""The lighthouse: a small server at which the replica groups of a run meet."""

import os
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance

TICK_MS = 50
"""How often it looks whether a quorum is complete."""


class NoLighthouseError(Exception):
    """It does not answer; it may be on its way."""


def start_lighthouse(fault_tolerance: FaultTolerance, *, port: int) -> Any:
    """Serves in a thread of this process, until `shutdown()`; port 0 takes a free one. `address()` is its URL.

    The fewest groups that it lets train are those of the run: with fewer, batches would be used up and nothing learnt.
    """
    os.environ.setdefault("RUST_LOG", "error")
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise ConfigError(['the lighthouse needs torchft: pip install "torchtitan_clone[ft]"']) from error
    try:
        return LighthouseServer(
            bind=f"[::]:{port}",
            min_replicas=fault_tolerance.min_replica_size,
            join_timeout_ms=fault_tolerance.join_timeout_ms,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=fault_tolerance.heartbeat_timeout_ms,
        )
    except RuntimeError as error:
        raise ConfigError(f"the lighthouse cannot listen at port {port}: {error}; choose another") from None


def lighthouse_place(address: str) -> tuple[str, int]:
    """Host and port of an address as the lighthouse prints it; ConfigError if it is none."""
    url = urlsplit(address)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if not (host and port):
        raise ConfigError(
            f"$TORCHFT_LIGHTHOUSE = {address}: must be an address as scripts/lighthouse.py prints it, http://HOST:PORT"
        )
    return host, port


def await_lighthouse(address: str, *, seconds: float) -> None:
    """Returns when a server listens there; NoLighthouseError after so many seconds."""
    place = lighthouse_place(address)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(place, timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() > deadline - 0.2:
                raise NoLighthouseError(
                    f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {address} ({error}); start scripts/lighthouse.py "
                    "there, or set the variable to the address that it prints"
                ) from None
            time.sleep(0.2)
        else:
            return
