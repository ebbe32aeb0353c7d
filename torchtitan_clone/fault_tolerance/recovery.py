"""How a replica group that is behind gets the state of one that is not: tensor by tensor, rank i from rank i.

It goes through the process group in which gradients travel, while all groups wait at the start of a step. Nothing is
served from a thread that runs beside training, nothing received is unpickled, and what arrives is complete before any
of it is used: a source that dies half-way leaves the receiver as it was.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport
from torchft.process_group import ProcessGroup

from torchtitan_clone.config import ConfigError


class UnlikeGroupsError(ConfigError):
    """Replica groups do not train the same model in the same way."""


class PeerTransport(CheckpointTransport[Any]):
    """Sends and receives {"torchft": ..., "user": {KEY: note}} as JSON, and the tensors beside it.

    `device` is where the process group takes tensors from.
    """

    KEY = "training"

    def __init__(self, pg: ProcessGroup, *, tensors: Mapping[str, Tensor], device: torch.device):
        self._pg = pg
        self._tensors = tensors
        self._device = device
        shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()]
        self._kind = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()
        self.received: list[Tensor] = []

    def metadata(self) -> str:
        """Nothing has to be known to receive."""
        return "none"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Sends to each of these replica groups, one after another."""
        header = json.dumps({"step": step, "kind": self._kind, "state": state_dict}).encode()
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for rank in dst_ranks:
            for tensor in (torch.tensor([len(text)]), text, *self._tensors.values()):
                if tensor.numel():
                    self._pg.send([tensor.detach().to(self._device).contiguous()], rank, 0).wait(timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receives into new memory; `apply` copies it to where it belongs."""

        def receive(tensor: Tensor) -> Tensor:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if tensor.numel():
                self._pg.recv([buffer], src_rank, 0).wait(timeout)
            return buffer

        (length,) = receive(torch.zeros(1, dtype=torch.int64)).tolist()
        header = json.loads(bytes(receive(torch.empty(length, dtype=torch.uint8)).tolist()))
        if header["kind"] != self._kind:
            raise UnlikeGroupsError(
                "another replica group has another model, optimizer or number of ranks, and cannot heal this one"
            )
        if header["step"] != step:
            raise RuntimeError(f"a replica group sent step {header['step']}, not {step}")
        self.received = [receive(tensor) for tensor in self._tensors.values()]
        return header["state"]

    def apply(self) -> None:
        """Copies what was received over the live tensors."""
        for tensor, received in zip(self._tensors.values(), self.received, strict=True):
            tensor.detach().copy_(received)
        self.received = []
