"""How long a rank spends in collectives, its own part of them and its wait for other ranks together."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_clone.parallel.trace import collective_name, let_look_inside


class CollectiveClock(TorchDispatchMode):
    """Sums the seconds of the collectives that run inside it, each of which is waited for at once.

    Nothing overlaps inside, so that what is not communication is this rank's own work. Results are the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective_name(func) is None:
            return func(*args, **(kwargs or {}))
        self._synchronize()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.ScriptObject):
                dist.Work.unbox(value).wait()
            elif isinstance(value, torch.Tensor) and func.namespace == "_c10d_functional":
                torch.ops._c10d_functional.wait_tensor(value)
        self._synchronize()
        self.seconds += time.perf_counter() - start
        return result

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


let_look_inside(CollectiveClock)
