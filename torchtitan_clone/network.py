"""Network interfaces of this machine, and sockets that listen at one of its addresses instead of all.

The processes of a run communicate over one interface: loopback as long as all of them are on this machine.
"""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks of a large run connect at once."""
STORE_TIMEOUT = timedelta(minutes=5)  # as torch's
_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPES = ("00", "10")  # of addresses in if_inet6: global and loopback; link-local ones need a zone


class NoAnswerError(Exception):
    """A server of the run does not answer. It may still be starting, so that a retry can succeed."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface and its address; `name` is "" if the address belongs to no interface that is known."""

    name: str
    address: str


class InterfaceError(Exception):
    """This machine has no interface of this name, or the interface has no address."""


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address means this machine and no other; False if it cannot be resolved."""
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # the latter for a label that is empty or too long
        return False
    return all(ip_address(address.partition("%")[0]).is_loopback for address in found)


def find_interface(name: str) -> Interface:
    """Returns the interface of this name with its IPv4 address, or its IPv6 address if it has no other."""
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise InterfaceError(f"this machine has no such network interface; available: {', '.join(names)}")
    address = next(_addresses(name), None)
    if address is None:
        raise InterfaceError("this network interface has no address; choose another, or leave the option out")
    return Interface(name=name, address=address)


def choose_interface(name: str, *, hosts: Iterable[str]) -> Interface | None:
    """Returns the interface over which a run with processes on these hosts communicates.

    It is the one of this name if given; else loopback if all hosts are this machine; else the one that routes to the
    first other host, None if there is no route. InterfaceError as find_interface().
    """
    if name:
        return find_interface(name)
    others = [host for host in hosts if not is_loopback(host)]
    address = _own_address_towards(others[0]) if others else LOOPBACK
    return None if address is None else Interface(name=_owner_of(address), address=address)


def _own_address_towards(host: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        for family, *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # on a datagram socket this looks up the route and sends nothing
                return probe.getsockname()[0]
    return None


def _owner_of(address: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address in _addresses(name)), "")


def _addresses(name: str) -> Iterator[str]:
    """Yields the first IPv4 address of an interface and then its IPv6 addresses."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        yield socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, owner = line.split()
            if owner == name and scope in _GLOBAL_SCOPES:
                yield str(ip_address(bytes.fromhex(digits)))


def listen(host: str, *, port: int = 0) -> socket.socket:
    """Returns a socket that listens at one address; port 0 picks a free one. OSError if it is not ours or in use."""
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family, backlog=BACKLOG)


def serve_store(
    host: str, *, port: int = 0, clients: int | None = None, timeout: timedelta = STORE_TIMEOUT
) -> "TCPStore":
    """Serves a store at one address; one that torch binds listens at all of them. OSError as listen().

    Waits until `clients` have connected, this one included, if given. A store has no password: who connects can read
    and write it.
    """
    from torch.distributed import TCPStore

    listener = listen(host, port=port)
    address, bound_port = listener.getsockname()[:2]
    return TCPStore(
        address,
        bound_port,
        world_size=clients,
        is_master=True,
        timeout=timeout,
        wait_for_workers=clients is not None,
        master_listen_fd=listener.detach(),
    )


def join_host_and_port(host: str, port: int) -> str:
    """Returns "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
