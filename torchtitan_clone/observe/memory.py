"""Peak memory of this process."""

import resource

import torch


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak memory so far in GiB: reserved by the CUDA allocator, or resident size of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
