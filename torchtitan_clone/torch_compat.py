"""Private names of torch and torchft that this project uses, each with its reason."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

# --- checkpoint ---


def default_store() -> dist.Store:
    """Returns the key-value store of the default process group.

    torch offers no public way to get it: opening a second TCPStore client needs the address, which a process group that
    was started from a given store does not have. Can go when torch.distributed exports it.
    """
    return _get_default_store()
