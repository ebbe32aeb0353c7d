"""The lighthouse: a small server through which the replica groups of a run find each other and form a quorum."""

import ctypes
import errno
import logging
import math
import os
import platform
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.config.started import as_started
from torchtitan_clone.network import LOOPBACK, NoAnswerError, join_host_and_port

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

logger = logging.getLogger("torchtitan_clone")

TICK_MS = 50
ALL_ADDRESSES = ("0.0.0.0", "::")
CONNECT_NUMBERS = {"x86_64": 42, "aarch64": 203}
"""Number of the system call connect() by architecture; torchft has packages for these."""
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Lighthouse:
    """A running lighthouse and the URL at which replica groups reach it."""

    server: "LighthouseServer"
    url: str


def start_lighthouse(fault_tolerance: FaultTolerance, *, port: int, bind: str = LOOPBACK) -> Lighthouse:
    """Starts the lighthouse in threads of this process, which cannot open connections; server.shutdown() ends it.

    `bind` is the address of this machine to listen at: loopback serves this machine only. Port 0 picks a free one.
    ConfigError if the port is in use, the address is not of this machine, or torchft is not installed.
    """
    os.environ.setdefault("RUST_LOG", "error")
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise ConfigError([f"the lighthouse needs torchft: {install('torchft')}"]) from error

    def start() -> LighthouseServer:
        forbid_connections()  # inherited by the server's threads
        return LighthouseServer(
            bind=join_host_and_port(address, port),  # a name cannot be resolved without connections
            min_replicas=fault_tolerance.min_replica_size,
            join_timeout_ms=fault_tolerance.join_timeout_ms,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=fault_tolerance.heartbeat_timeout_ms,
        )

    try:
        address = str(socket.getaddrinfo(bind, None, type=socket.SOCK_STREAM)[0][4][0])
        with ThreadPoolExecutor(max_workers=1) as thread:
            server = thread.submit(start).result()
    except (OSError, UnicodeError, RuntimeError) as error:
        place = f"at port {port}" if bind == LOOPBACK else f"at {join_host_and_port(bind, port)}"
        remedy = "choose another port" if bind == LOOPBACK else "choose another port, or an address of this machine"
        raise ConfigError(f"the lighthouse cannot listen {place}: {error}; {remedy}") from None
    own_port = int(server.address().rpartition(":")[2])
    host = socket.gethostname() if bind in ALL_ADDRESSES else bind
    return Lighthouse(server=server, url=f"http://{join_host_and_port(host, own_port)}")


def forbid_connections() -> None:
    """Lets the kernel refuse every connect() of this thread and of threads that it starts, for ever.

    torchft's lighthouse ends a replica group for whoever requests /replica/<id>/kill, by connecting to its manager; it
    has no option against it. Nothing else that it does connects anywhere. ConfigError if the kernel cannot do so.
    """
    number = CONNECT_NUMBERS.get(platform.machine())
    if number is None:
        raise ConfigError(f"the lighthouse supports {' and '.join(CONNECT_NUMBERS)}, not {platform.machine()}")
    program = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, number),  # unless it is connect, skip one instruction
        (0x06, 0, 0, 0x00050000 | errno.EACCES),  # return this error
        (0x06, 0, 0, 0x7FFF0000),  # allow the call
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    # A process without privileges must give up gaining any before it may set a filter.
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"the lighthouse needs a kernel with seccomp filters: {reason}; start it on another machine")


def parse_lighthouse_address(address: str) -> tuple[str, int]:
    """Returns host and port of a lighthouse's URL. ConfigError if it has none."""
    try:
        url = urlsplit(address)
        if url.hostname and url.port:
            url.hostname.encode("idna")  # as the resolver does
            return url.hostname, url.port
    except ValueError:  # the port is not a number, or the host not a name
        pass
    raise ConfigError(
        f"$TORCHFT_LIGHTHOUSE = {address}: must be an address as {as_started('scripts/lighthouse.py')} prints it, "
        "http://HOST:PORT"
    )


def wait_for_lighthouse(address: str, *, seconds: float) -> None:
    """Waits until a server listens at the address. NoAnswerError if there is none after `seconds`, may be inf."""
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
                raise NoAnswerError(
                    f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {address} ({error}); "
                    f"{as_started('start scripts/lighthouse.py')} there, or set the variable to the address that it "
                    "prints"
                ) from None
            time.sleep(0.2)
