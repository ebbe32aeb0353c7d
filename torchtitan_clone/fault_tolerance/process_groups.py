"""torchft's process groups with a separate, shorter timeout for connecting."""

from datetime import timedelta
from typing import Any

import torchft
from torchft.process_group import ProcessGroupWrapper

from torchtitan_clone.torch_compat import set_group_timeout


class _ConnectTimeout(ProcessGroupWrapper):
    """Mixin that connects with `connect_timeout` and runs collectives with `timeout`.

    All groups learn of a new quorum at the same time, so a group that does not connect soon has died.
    """

    device_type = "cpu"

    def __init__(self, *, timeout: timedelta, connect_timeout: timedelta):
        super().__init__(timeout)
        self._collective_timeout = timeout
        self._connect_timeout = connect_timeout

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Connects to the groups of a new quorum; takes the arguments of torchft's method."""
        self.set_timeout(self._connect_timeout)
        try:
            super().configure(*args, **kwargs)
        finally:
            self.set_timeout(self._collective_timeout)
        set_group_timeout(self.parent, self._collective_timeout, device_type=self.device_type)


class Gloo(_ConnectTimeout, torchft.ProcessGroupGloo):
    """Communicates over the network through host memory."""


class Nccl(_ConnectTimeout, torchft.ProcessGroupNCCL):
    """Communicates between GPUs."""

    device_type = "cuda"


PROCESS_GROUPS = {"gloo": Gloo, "nccl": Nccl}
