"""The lighthouse: a small server through which the replica groups of a run find each other and form a quorum."""

import logging
import math
import os
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

logger = logging.getLogger("torchtitan_clone")

TICK_MS = 50
CONNECT_SECONDS = 10.0


class NoLighthouseError(Exception):
    """The lighthouse does not answer. It may still be starting, so that a retry can succeed."""


def start_lighthouse(fault_tolerance: FaultTolerance, *, port: int) -> "LighthouseServer":
    """Starts the lighthouse in a thread of this process; `address()` is its URL and `shutdown()` ends it.

    Port 0 picks a free one. ConfigError if the port is in use, or if torchft is not installed.
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
        raise ConfigError(f"the lighthouse cannot listen at port {port}: {error}; choose another port") from None


def parse_lighthouse_address(address: str) -> tuple[str, int]:
    """Returns host and port of a lighthouse's URL. ConfigError if it has none."""
    try:
        url = urlsplit(address)
        if url.hostname and url.port:
            return url.hostname, url.port
    except ValueError:  # the port is not a number
        pass
    raise ConfigError(
        f"$TORCHFT_LIGHTHOUSE = {address}: must be an address as scripts/lighthouse.py prints it, http://HOST:PORT"
    )


def wait_for_lighthouse(address: str, *, seconds: float) -> None:
    """Waits until a server listens at the address. NoLighthouseError if there is none after `seconds`, may be inf."""
    host_and_port = parse_lighthouse_address(address)
    deadline = time.monotonic() + seconds
    is_reported = False
    while True:
        timeout = min(CONNECT_SECONDS, max(0.1, deadline - time.monotonic()))
        try:
            return socket.create_connection(host_and_port, timeout=timeout).close()
        except OSError as error:
            if seconds == math.inf and not is_reported:
                logger.warning("waiting for the lighthouse at %s: %s", address, error)
                is_reported = True
            if time.monotonic() > deadline - 0.2:
                raise NoLighthouseError(
                    f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {address} ({error}); start scripts/lighthouse.py "
                    "there, or set the variable to the address that it prints"
                ) from None
            time.sleep(0.2)
