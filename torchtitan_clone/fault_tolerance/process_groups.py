"""torchft's process groups, with less patience for a replica group that dies while they connect."""

from datetime import timedelta
from typing import Any

import torchft

from torchtitan_clone.torch_compat import set_group_timeout


class _ConnectsSoon:
    """Before one of torchft's classes. All groups of a quorum learn of it at once: who lives does not connect late."""

    device = "cpu"

    def __init__(self, *, timeout: timedelta, connect_timeout: timedelta):
        super().__init__(timeout)  # type: ignore[call-arg]
        self._collective_timeout, self._connect_timeout = timeout, connect_timeout

    def configure(self: Any, *args: Any, **kwargs: Any) -> None:
        """Connects to the groups of a new quorum, as torchft's classes do."""
        self.set_timeout(self._connect_timeout)
        try:
            super().configure(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.set_timeout(self._collective_timeout)
        set_group_timeout(self.parent, self._collective_timeout, device_type=self.device)


class Gloo(_ConnectsSoon, torchft.ProcessGroupGloo):
    """Over the network, through host memory."""


class Nccl(_ConnectsSoon, torchft.ProcessGroupNCCL):
    """Between GPUs."""

    device = "cuda"


PROCESS_GROUPS = {"gloo": Gloo, "nccl": Nccl}
