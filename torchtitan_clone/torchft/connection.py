"""The connection of one rank to the same rank of the other replica groups: torchft's manager, collectives and recovery.

Collectives report failure through the manager instead of raising it. A group that is behind receives the state of a
peer, tensor by tensor, through the process group of the gradients, while all groups wait at the start of a step. All of
it is received before any of it is used, so a peer that dies while sending leaves the receiver unchanged.
"""

import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport
from torchft.coordination import ManagerServer
from torchft.manager import MANAGER_ADDR_KEY, MANAGER_PORT_ENV, REPLICA_ID_KEY
from torchft.process_group import ProcessGroup, ProcessGroupWrapper

from torchtitan_clone.comm.json_collectives import broadcast_json
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.config.started import as_started
from torchtitan_clone.documents import MAX_BYTES, DocumentError, Value, parse_json
from torchtitan_clone.network import join_host_and_port, listen, serve_store
from torchtitan_clone.replicas.protocol import RecoveryState, StreamPositions
from torchtitan_clone.torch_compat import set_group_timeout
from torchtitan_clone.torchft.lighthouse import wait_for_lighthouse

logger = logging.getLogger("torchtitan_clone")

HEARTBEAT_INTERVAL = timedelta(milliseconds=100)  # torchft's default
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

    `address` is that of this machine at which ranks and other groups connect to what rank 0 serves.
    RuntimeError if the lighthouse does not answer; ConfigError if the manager's port is in use.
    """

    def __init__(self, options: FaultTolerance, *, recovery: RecoveryState, device: torch.device, address: str):
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
            self._served = _serve(options, address=address, connect_timeout=connect_timeout)
            host, port = _share_address(self._served)
            self.manager = torchft.Manager(
                pg=self.process_group,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=options.min_replica_size,
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timeout,
                connect_timeout=connect_timeout,
                rank=dist.get_rank() + 1,  # rank 0 would serve another manager, at all addresses of this machine
                world_size=dist.get_world_size(),
                store_addr=host,
                store_port=port,
                replica_id=f"replica_{options.replica_id}",
                checkpoint_transport=self.transport,
                init_sync=False,  # initial weights are a function of the seed
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"no lighthouse answers at $TORCHFT_LIGHTHOUSE = {os.environ['TORCHFT_LIGHTHOUSE']}; "
                f"{as_started('start scripts/lighthouse.py')} first ({error})"
            ) from None

    def close(self) -> None:
        """Leaves the other groups."""
        self.manager.shutdown(wait=False)
        if self._served is not None:
            self._served.manager.shutdown()


@dataclass(frozen=True, kw_only=True)
class _Served:
    """What rank 0 serves to its replica group and to the others."""

    store: dist.TCPStore
    manager: ManagerServer


def _serve(options: FaultTolerance, *, address: str, connect_timeout: timedelta) -> _Served | None:
    """Serves, on rank 0, a store and torchft's manager of this replica group at one address of this machine.

    torchft.Manager would serve its manager at all addresses; the keys in the store are where it looks for another.
    """
    if dist.get_rank() != 0:
        return None
    port = environment_integer(MANAGER_PORT_ENV, default=0, high=65535)
    try:
        listen(address, port=port).close()
    except OSError as error:
        rule = f"this replica group cannot listen at {address}: {os.strerror(error.errno or 0)}"
        raise ConfigError(f"${MANAGER_PORT_ENV} = {port}: {rule}; set it to a free port, or unset it") from None
    store = serve_store(address)
    replica_id = f"replica_{options.replica_id}:{uuid.uuid4()}"
    manager = ManagerServer(
        replica_id=replica_id,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        hostname=f"[{address}]" if ":" in address else address,
        bind=join_host_and_port(address, port),
        store_addr=f"{address}:{store.port}",
        world_size=dist.get_world_size(),
        heartbeat_interval=HEARTBEAT_INTERVAL,
        connect_timeout=connect_timeout,
        quorum_retries=0,
    )
    store.set(MANAGER_ADDR_KEY, manager.address())
    store.set(REPLICA_ID_KEY, replica_id)
    return _Served(store=store, manager=manager)


def _share_address(served: _Served | None) -> tuple[str, int]:
    """Returns host and port of the store that rank 0 serves."""
    host, port = broadcast_json(None if served is None else [served.store.host, served.store.port]).items(count=2)
    return host.text(), port.integer(low=1, high=65535)


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


BUCKET_BYTES = 32 << 20


class ReplicaCollectives:
    """Collectives of one rank with the same rank of the other replica groups.

    After the first failure every further collective of the attempt returns at once, and the attempt is not committed.
    """

    def __init__(self, manager: torchft.Manager, *, device: torch.device):
        self._manager = manager
        self._device = device

    def error(self) -> Exception | None:
        """Returns the first failure since the quorum was formed."""
        error = self._manager.errored()
        return error and error.original_exception

    def sum(self, values: list[float]) -> list[float]:
        """Returns each number summed over the groups, or `values` if that fails."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._manager.allreduce(total, reduce_op=dist.ReduceOp.SUM).wait()
        return total.tolist() if self.error() is None else values

    def start_sum(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """Starts to sum local tensors over the groups; call the result to wait and write the sums into the tensors."""
        pending: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]).to(self._device)
            pending.append((bucket, flat, self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM)))

        def finish() -> None:
            for bucket, flat, work in pending:
                work.wait()
                totals = flat.split([tensor.numel() for tensor in bucket])
                for tensor, total in zip(bucket, totals, strict=True):
                    tensor.copy_(total.view_as(tensor))

        return finish

    def gather(self, values: StreamPositions, *, replica_index: int, num_replicas: int) -> StreamPositions:
        """Returns the values of all groups, concatenated in their order, or `values` if that fails."""
        if not values or num_replicas == 1:
            return values
        text = bytearray(json.dumps(values).encode())
        lengths = [int(n) for n in self.sum([len(text) * (replica_index == index) for index in range(num_replicas)])]
        table = torch.zeros(num_replicas, max(lengths), dtype=torch.uint8)
        table[replica_index, : len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        table = table.to(self._device)
        self._manager.allreduce(table, reduce_op=dist.ReduceOp.SUM).wait()
        if self.error() is not None:
            return values
        texts = [bytes(row[:length]) for row, length in zip(table.tolist(), lengths, strict=True)]
        return [value for text in texts for value in json.loads(text)]


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups consecutive tensors of one dtype into buckets of about BUCKET_BYTES."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (sum(t.nbytes for t in bucket) >= BUCKET_BYTES or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


ManagerState = dict[str, object]
"""What torchft transfers: {"torchft": its own state, "user": {STATE_KEY: metadata}}."""
STATE_KEY = "training"


class ReplicaMismatchError(ConfigError):
    """Replica groups were not started with the same configuration, or not with different replica ids."""


class PeerTransport(CheckpointTransport[ManagerState]):
    """Sends and receives torchft's state as JSON, then the local shards `tensors`; `device` is that of the buffers."""

    def __init__(self, pg: ProcessGroup, *, tensors: Mapping[str, Tensor], device: torch.device):
        self._pg = pg
        self._tensors = tensors
        self._device = device
        shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]
        self._layout_digest = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()
        self._received: list[Tensor] = []

    def metadata(self) -> str:
        return "none"  # the receiver needs to know nothing in advance

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: ManagerState, timeout: timedelta) -> None:
        header = json.dumps({"step": step, "layout": self._layout_digest, "state": state_dict}).encode()
        header_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for rank in dst_ranks:
            for tensor in (torch.tensor([len(header_bytes)]), header_bytes, *self._tensors.values()):
                if tensor.numel():
                    self._pg.send([tensor.detach().to(self._device).contiguous()], rank, 0).wait(timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> ManagerState:
        """Receives into new buffers; ReplicaMismatchError if the peer's tensors have other names, shapes or dtypes.

        DocumentError if the header is not one: torchft then repeats the quorum.
        """

        def receive(tensor: Tensor) -> Tensor:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if tensor.numel():
                self._pg.recv([buffer], src_rank, 0).wait(timeout)
            return buffer

        (length,) = receive(torch.zeros(1, dtype=torch.int64)).tolist()
        if not 0 < length <= MAX_BYTES:
            raise DocumentError(
                f"a replica group announces a header of {length:,} bytes; at most {MAX_BYTES:,} are read"
            )
        header = receive(torch.empty(length, dtype=torch.uint8)).cpu().numpy().tobytes()
        state = self._checked_state(parse_json(header, where="the header of a replica group"), step=step)
        self._received = [receive(tensor) for tensor in self._tensors.values()]
        return state

    def _checked_state(self, header: Value, *, step: int) -> ManagerState:
        """Returns torchft's state; the training state in it is checked by whoever loads it."""
        content = header.table("step", "layout", "state")
        if content["layout"].text() != self._layout_digest:
            raise ReplicaMismatchError(
                "another replica group has a different model, optimizer or number of ranks, so this one cannot load "
                "its state; start all replica groups with the same configuration and the same number of ranks"
            )
        content["step"].integer(low=step, high=step)
        state = content["state"].table("torchft", "user")
        for count in state["torchft"].table("step", "batches_committed").values():
            count.integer()
        state["user"].table(STATE_KEY)[STATE_KEY].entries()
        return {key: each.value for key, each in state.items()}

    def copy_received(self) -> None:
        for tensor, received in zip(self._tensors.values(), self._received, strict=True):
            tensor.detach().copy_(received)
        self._received = []
