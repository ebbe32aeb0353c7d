"""What the core finds here: `replicas.protocol.ReplicaGroups`."""

import os
from collections.abc import Sequence
from importlib.util import find_spec

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.messages import install
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.config.started import as_started
from torchtitan_clone.replicas.protocol import ReplicaContext, ReplicaGroup
from torchtitan_clone.torchft.lighthouse import parse_lighthouse_address, wait_for_lighthouse
from torchtitan_clone.torchft.outer import init_outer_weights as init_outer_weights
from torchtitan_clone.torchft.outer import outer_state as outer_state
from torchtitan_clone.torchft.outer import split_into_fragments

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse."""


def check_requirements() -> None:
    """Raises ConfigError if this machine lacks something that replica groups need."""
    problems = []
    if find_spec("torchft") is None:
        problems.append(
            f"fault_tolerance.enable: the package torchft is not installed; {install('torchft')}, or set it to false"
        )
    if address := os.environ.get(LIGHTHOUSE):
        parse_lighthouse_address(address)
    else:
        problems.append(
            f"fault_tolerance.enable: ${LIGHTHOUSE} is not set; {as_started('start scripts/lighthouse.py')} and set "
            "it to the address that it prints"
        )
    environment_integer("TORCHFT_MANAGER_PORT", default=0, high=65535)
    if problems:
        raise ConfigError(problems)


def check_parameters(fault_tolerance: FaultTolerance, *, names: Sequence[str]) -> None:
    """Raises ConfigError if the fragments of semi-synchronous training are not those of a model with these names."""
    if fault_tolerance.semi_sync_method is not None:
        split_into_fragments(names, fault_tolerance, own=())


def wait_for_peers(*, seconds: float) -> str:
    """Returns the lighthouse's host, once it answers. NoAnswerError after `seconds`, which may be inf."""
    wait_for_lighthouse(os.environ[LIGHTHOUSE], seconds=seconds)
    return peers_host()


def peers_host() -> str:
    """Returns the lighthouse's host."""
    return parse_lighthouse_address(os.environ[LIGHTHOUSE])[0]


def join(fault_tolerance: FaultTolerance, *, run: ReplicaContext) -> ReplicaGroup:
    """Connects this rank to the lighthouse; a collective over the ranks of the replica group."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported; by default it logs every quorum
    from torchtitan_clone.torchft.group import TorchFTGroup
    from torchtitan_clone.torchft.semi_sync import SemiSyncGroup

    group = TorchFTGroup if fault_tolerance.semi_sync_method is None else SemiSyncGroup
    return group(fault_tolerance, run=run)
