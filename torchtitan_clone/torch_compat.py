"""Every private name of torch and torchft that the package uses, behind a public one."""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import torchft


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta, *, device_type: str | None = None) -> None:
    """Sets how long later collectives of the group may take, on all of its devices or on one type of them.

    init_process_group() and new_group() take a timeout once; there is no public way to change it.
    """
    devices = [torch.device(device_type)] if device_type else [torch.device(kind) for kind in group._device_types]
    for backend in {group._get_backend(device) for device in devices}:
        backend._set_default_timeout(timeout)


# --- torchft ---------------------------------------------------------------------------------------------------------


def quorum_id(manager: "torchft.Manager") -> int:
    """Returns the number of the quorum that the manager is in, -1 before the first. It has no public property."""
    return manager._quorum_id


def forget_failed_quorum(manager: "torchft.Manager") -> None:
    """Lets a manager start another quorum after one that failed, whose error it would raise again."""
    manager._quorum_future = None
