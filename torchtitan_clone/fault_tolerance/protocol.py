"""What the trainer knows of other replica groups: nothing but these methods, whether there are others or not.

A *replica group* is one run of this program, with a process group of its own; all replica groups of a run train one
model. A step is one *attempt* or more: an attempt that is not *committed*, because a group died in it or its gradient
is not finite, leaves no trace, and the same rows are fed again to the groups that are left.
"""

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.lighthouse import lighthouse_place


@dataclass(frozen=True, kw_only=True)
class RecoveryState:
    """What a replica group that is behind takes over from one that is not."""

    tensors: dict[str, Tensor]
    """This rank's part of parameters and optimizer state: the very tensors, which must stay the same objects."""
    note: Callable[[], dict[str, Any]]
    """All other state, as plain data."""
    take_over: Callable[[dict[str, Any]], None]
    """Called with another group's note just before the tensors get that group's values."""
    positions: Callable[[], list[Any]]
    """What only the groups together know: where the data are that this rank has read for the step; plain data."""
    take_positions: Callable[[list[Any]], None]
    """Called after the step with those of the same rank of all groups."""


class SingleReplica:
    """The only replica group: every attempt is a step."""

    part, parts = 0, 1
    writes = True

    def begin(self) -> bool:
        """There is nobody to wait for."""
        return True

    def lost_steps(self) -> set[int]:
        """Nobody trains a step again behind this group's back."""
        return set()

    def sum(self, values: list[float]) -> list[float]:
        """The sums over one group are its own values."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients are summed already."""

    def record(self, rows: range) -> None:
        """The rows of a step follow from its number."""

    def commit(self, *, healthy: bool) -> bool:
        """The step counts, even if it is skipped because it is not healthy."""
        return True

    def complete(self) -> bool:
        """Nothing is taken back."""
        return True

    def close(self) -> None:
        """Nothing was opened."""


def build_replicas(fault_tolerance: FaultTolerance, **needs: Any) -> Any:
    """What the trainer talks to: SingleReplica, or an TorchFTGroup, which documents what it needs."""
    if not fault_tolerance.enable:
        return SingleReplica()
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is imported, and tells every quorum without
    from torchtitan_clone.fault_tolerance.semi_sync import SemiSyncGroup
    from torchtitan_clone.fault_tolerance.torchft_group import TorchFTGroup

    if fault_tolerance.semi_sync_method is not None:
        return SemiSyncGroup(fault_tolerance, **needs)
    del needs["parameters"], needs["outer"]
    return TorchFTGroup(fault_tolerance, **needs)


def check_replicas(fault_tolerance: FaultTolerance, *, lighthouse: str | None) -> None:
    """ConfigError where this machine lacks what replica groups need."""
    if not fault_tolerance.enable:
        return
    problems = []
    if find_spec("torchft") is None:
        problems.append(
            'fault_tolerance.enable: the package torchft is not installed; pip install "torchtitan_clone[ft]", '
            "or set it to false"
        )
    if not lighthouse:
        problems.append(
            "fault_tolerance.enable: $TORCHFT_LIGHTHOUSE is not set; start scripts/lighthouse.py and set it to the "
            "address that it prints"
        )
    else:
        lighthouse_place(lighthouse)
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        problems.append(
            f"fault_tolerance.enable: other replica groups find this machine by its name, and {socket.gethostname()} "
            "does not resolve; add it to /etc/hosts or to the name server"
        )
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError as error:
        problems.append(
            f"fault_tolerance.enable: torchft's servers listen on IPv6, which this machine does not have ({error}); "
            "enable it in the kernel, an address is not needed"
        )
    if problems:
        raise ConfigError(problems)
