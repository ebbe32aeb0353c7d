"""The connection of one rank to the same rank of the other replica groups: torchft's manager and process group."""

import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.context import RecoveryState
from torchtitan_clone.fault_tolerance.process_groups import PROCESS_GROUPS, Gloo, Nccl
from torchtitan_clone.fault_tolerance.recovery import PeerTransport

logger = logging.getLogger("torchtitan_clone")

OVERRIDING_VARIABLES = ("TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")
"""Environment variables that torchft prefers to the arguments of its manager."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """torchft's objects of one rank."""

    manager: torchft.Manager
    process_group: Gloo | Nccl
    transport: PeerTransport
    store: dist.TCPStore | None
    """Served by the first rank; referenced here to keep it alive."""
    device: torch.device
    """Device of the tensors that the process group communicates."""
    timeout: timedelta
    """Of one collective."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0 of the replica group, the one that logs."""
        return dist.get_rank() == 0


def connect(fault_tolerance: FaultTolerance, *, recovery: RecoveryState, device: torch.device) -> Connection:
    """Builds the connection and registers with the lighthouse; a collective over the ranks of the replica group.

    RuntimeError if the lighthouse does not answer.
    """
    timeout = timedelta(milliseconds=fault_tolerance.process_group_timeout_ms)
    connect_timeout = min(timeout, timedelta(milliseconds=fault_tolerance.heartbeat_timeout_ms))
    device = device if fault_tolerance.process_group == "nccl" else torch.device("cpu")
    process_group = PROCESS_GROUPS[fault_tolerance.process_group](timeout=timeout, connect_timeout=connect_timeout)
    transport = PeerTransport(process_group, tensors=recovery.tensors, device=device)
    logging.getLogger("torchft").setLevel(logging.CRITICAL)  # failures are logged by `Quorum`, in one line
    try:
        host, port, store = _open_store()
        manager = torchft.Manager(
            pg=process_group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=fault_tolerance.min_replica_size,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=connect_timeout,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=host,
            store_port=port,
            hostname=socket.gethostname(),
            replica_id=f"replica_{fault_tolerance.replica_id}",
            checkpoint_transport=transport,
            init_sync=False,  # initial weights are a function of the seed
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {os.environ['TORCHFT_LIGHTHOUSE']}; start "
            f"scripts/lighthouse.py first ({error})"
        ) from None
    return Connection(
        manager=manager, process_group=process_group, transport=transport, store=store, device=device, timeout=timeout
    )


def _open_store() -> tuple[str, int, dist.TCPStore | None]:
    """Serves a store that other machines can reach; torchrun's may be bound to an address of this machine only."""
    address: list[tuple[str, int] | None] = [None]
    store = None
    if dist.get_rank() == 0:
        host = socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = [(host, store.port)]
    dist.broadcast_object_list(address)
    assert address[0] is not None
    return *address[0], store


def warn_of_hazards(fault_tolerance: FaultTolerance) -> None:
    """Logs settings under which timeouts or the loss of a group do not behave as configured."""
    for name in OVERRIDING_VARIABLES:
        if name in os.environ:
            logger.warning("$%s = %s overrides fault_tolerance.process_group_timeout_ms", name, os.environ[name])
    if fault_tolerance.group_size == 2:
        logger.warning(
            "with two replica groups neither has a majority: if one hangs without exiting, the other waits until the "
            "step timeout (fault_tolerance.stall_factor) ends it; with three groups the others continue without it"
        )
