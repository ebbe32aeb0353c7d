"""Recovery of a replica group that is behind: rank i receives the state of a peer's rank i, tensor by tensor.

The state is sent through the process group of the gradients, while all groups wait at the start of a step. All of it is
received before any of it is used, so a peer that dies while sending leaves the receiver unchanged.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport
from torchft.process_group import ProcessGroup

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import MAX_BYTES, DocumentError, Value, parse_json

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
