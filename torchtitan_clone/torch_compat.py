"""Every private name of torch and torchft that the package uses, behind a public one."""

import torch

# --- Memory ----------------------------------------------------------------------------------------------------------


def record_memory_history(*, max_entries: int) -> None:
    """Starts to record the allocations of CUDA memory. PyTorch documents the private name and has no other."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def stop_memory_history() -> None:
    """Stops to record the allocations of CUDA memory."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump_memory_snapshot(path: str) -> None:
    """Writes the recorded allocations to a file. torch.cuda.memory_snapshot() is public and leaves the history out."""
    torch.cuda.memory._dump_snapshot(path)
