"""The states of random number generators as tensors of a checkpoint, under names that contain the rank."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

RNG = "rng/"
CPU = f"{RNG}cpu/"
CUDA = f"{RNG}cuda/"
MAX_STATE_BYTES = 1 << 16


def random_state() -> dict[str, Tensor]:
    """Returns copies of the states of this rank's generators."""
    rank = dist.get_rank()
    states = {f"{CPU}{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{CUDA}{rank}"] = torch.cuda.get_rng_state()
    return states


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Sets the states that were loaded; a rank that did not exist when they were saved keeps its own."""
    for name, tensor in state.items():
        if name.startswith(CPU):
            torch.set_rng_state(tensor)
        elif name.startswith(CUDA):
            torch.cuda.set_rng_state(tensor)


def is_random_state(name: str, *, state: Tensor) -> bool:
    """Returns whether a generator accepts these bytes; those for CUDA are checked where there is a GPU."""
    device = "cuda" if name.startswith(CUDA) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return True
    try:
        torch.Generator(device).set_state(state)
    except (RuntimeError, TypeError):
        return False
    return True
