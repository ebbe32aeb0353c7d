"""The state of torch's random number generators, as tensors whose names contain the rank.

Under one name, the state of one rank would be saved and loaded by all ranks.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

PREFIX = "rng/"


def rng_state() -> dict[str, Tensor]:
    """Returns copies of the states of this rank's generators."""
    rank = dist.get_rank()
    states = {f"{PREFIX}cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{PREFIX}cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Sets the states that were loaded; a rank that did not exist when they were saved keeps its own."""
    for name, tensor in state.items():
        if name.startswith(f"{PREFIX}cpu/"):
            torch.set_rng_state(tensor)
        elif name.startswith(f"{PREFIX}cuda/"):
            torch.cuda.set_rng_state(tensor)
