"""The state of torch's random generators, as tensors under names that carry the rank.

Under one name for all ranks, one rank's state would silently become everybody's.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

PREFIX = "rng/"


def rng_state() -> dict[str, Tensor]:
    """This rank's generators; copies, so that a save may take its time."""
    rank = dist.get_rank()
    states = {f"{PREFIX}cpu/{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{PREFIX}cuda/{rank}"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Takes over what was loaded for this rank; a rank that did not exist at the save keeps its own."""
    for name, tensor in state.items():
        if name.startswith(f"{PREFIX}cpu/"):
            torch.set_rng_state(tensor)
        elif name.startswith(f"{PREFIX}cuda/"):
            torch.cuda.set_rng_state(tensor)
