"""The connection of one rank to the same rank of the other replica groups: torchft's manager and process group."""

import logging
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torchft.process_group import ProcessGroupWrapper

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.context import RecoveryState
from torchtitan_clone.fault_tolerance.lighthouse import wait_for_lighthouse
from torchtitan_clone.fault_tolerance.recovery import PeerTransport
from torchtitan_clone.torch_compat import set_group_timeout

logger = logging.getLogger("torchtitan_clone")

OVERRIDING_VARIABLES = ("TORCHFT_TIMEOUT_SEC", "TORCHFT_QUORUM_TIMEOUT_SEC", "TORCHFT_CONNECT_TIMEOUT_SEC")
"""Environment variables that torchft prefers to the arguments of its manager."""
LIGHTHOUSE_SECONDS = 200.0
"""Less than the 300 s after which the other ranks give up."""


class _ConnectTimeout(ProcessGroupWrapper):
    # All groups learn of a new quorum at the same time, so a group that does not connect soon has died. The limit is
    # doubled until groups that are only slow have connected.
    device_type = "cpu"

    def __init__(self, *, timeout: timedelta, connect_timeout: timedelta):
        super().__init__(timeout)
        self._collective_timeout = timeout
        self._first_connect_timeout = self._connect_timeout = connect_timeout

    def configure(self, store_addr: str, *args, **kwargs) -> None:
        self.set_timeout(self._connect_timeout)
        timeout, self._connect_timeout = self._connect_timeout, min(2 * self._connect_timeout, self._collective_timeout)
        try:
            _check_store(store_addr, timeout=timeout)
            super().configure(store_addr, *args, **kwargs)
        finally:
            self.set_timeout(self._collective_timeout)
        self._connect_timeout = self._first_connect_timeout
        set_group_timeout(self.parent, self._collective_timeout, device_type=self.device_type)


def _check_store(address: str, *, timeout: timedelta) -> None:
    """Raises OSError if the store at HOST:PORT/PREFIX is gone, at once: torch retries for 2.5 times its timeout."""
    host, _, port = address.partition("/")[0].rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout.total_seconds()).close()


class Gloo(_ConnectTimeout, torchft.ProcessGroupGloo):
    """Communicates over the network through host memory."""


class Nccl(_ConnectTimeout, torchft.ProcessGroupNCCL):
    """Communicates between GPUs."""

    device_type = "cuda"


class Connection:
    """torchft's manager, process group and transport of one rank; building one is a collective over its replica group.

    RuntimeError if the lighthouse does not answer.
    """

    def __init__(self, options: FaultTolerance, *, recovery: RecoveryState, device: torch.device):
        self.timeout = timeout = timedelta(milliseconds=options.process_group_timeout_ms)
        # Half: the survivors of a death are back before the heartbeat of the dead one has expired.
        connect_timeout = min(timeout, timedelta(milliseconds=options.heartbeat_timeout_ms) / 2)
        is_nccl = options.process_group == "nccl"
        self.device = device if is_nccl else torch.device("cpu")
        self.process_group = (Nccl if is_nccl else Gloo)(timeout=timeout, connect_timeout=connect_timeout)
        self.transport = PeerTransport(self.process_group, tensors=recovery.tensors, device=self.device)
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # failures are logged by `Quorum`, in one line
        if dist.get_rank() == 0:  # it may have died since this process found it; the other ranks wait for this one
            wait_for_lighthouse(os.environ["TORCHFT_LIGHTHOUSE"], seconds=LIGHTHOUSE_SECONDS)
        try:
            host, port, self._store = _open_store()
            self.manager = torchft.Manager(
                pg=self.process_group,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=options.min_replica_size,
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timeout,
                connect_timeout=connect_timeout,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                store_addr=host,
                store_port=port,
                hostname=socket.gethostname(),
                replica_id=f"replica_{options.replica_id}",
                checkpoint_transport=self.transport,
                init_sync=False,  # initial weights are a function of the seed
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {os.environ['TORCHFT_LIGHTHOUSE']}; start "
                f"scripts/lighthouse.py first ({error})"
            ) from None


def _open_store() -> tuple[str, int, dist.TCPStore | None]:
    """Serves a store that other machines can reach; torchrun's may be bound to an address of this machine only."""
    address: list[tuple[str, int] | None] = [None]
    store = None
    if dist.get_rank() == 0:
        store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        address = [(store.host, store.port)]
    dist.broadcast_object_list(address)
    assert address[0] is not None
    return *address[0], store


def warn_of_hazards(options: FaultTolerance) -> None:
    """Logs settings under which timeouts or the loss of a group do not behave as configured."""
    for name in OVERRIDING_VARIABLES:
        if name in os.environ:
            logger.warning("$%s = %s overrides fault_tolerance.process_group_timeout_ms", name, os.environ[name])
    if options.group_size == 2:
        logger.warning(
            "with two replica groups neither has a majority: if one hangs without exiting, the other waits until the "
            "step timeout (fault_tolerance.stall_factor) ends it; with three groups the others continue without it"
        )
