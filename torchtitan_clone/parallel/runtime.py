"""The process group, the device and the settings of torch that hold for the whole process."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Comm, Debug

logger = logging.getLogger("torchtitan_clone")

TOLD_AFTER_SECONDS = 10
"""Of waiting for other ranks."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where this process stands among its peers, as torchrun's environment variables say; alone without them."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def from_environment() -> "Launch":
        """Reads RANK, LOCAL_RANK and WORLD_SIZE."""
        rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in
                                        (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")))  # fmt: skip
        return Launch(rank=rank, local_rank=local_rank, world_size=world_size)


def pick_device(launch: Launch) -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank)


def meet(comm: Comm, *, launch: Launch, options: list[str], is_stop_wanted: Callable[[], bool]) -> bool:
    """Waits until all ranks are here; False on all of them where one was asked to stop before that.

    ConfigError on all of them where they have not all these `options`, which name what every rank must have alike;
    TimeoutError where some do not come. torch's own wait, which follows, hears no signal: a rank that is in it would be
    left there by one that is not.
    """
    if launch.world_size == 1 or "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        return True
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    mine = "\n".join(options)
    firsts = store.compare_set("torchtitan_clone/options", "", mine).decode()
    store.add("torchtitan_clone/unlike", int(firsts != mine))
    store.add("torchtitan_clone/present", 1)
    start, is_told, present = time.monotonic(), False, 0
    while (seconds := time.monotonic() - start) < comm.init_timeout_seconds:
        present = store.add("torchtitan_clone/present", 0)
        if present == launch.world_size or is_stop_wanted():
            if store.add("torchtitan_clone/unlike", 0):
                raise ConfigError(_describe_unlike(mine, firsts))
            # The first to have an opinion decides for all.
            opinion = "start" if present == launch.world_size else "stop"
            return store.compare_set("torchtitan_clone/verdict", "", opinion) == b"start"
        if seconds > TOLD_AFTER_SECONDS and not is_told:
            is_told = True
            logger.info("%d of %d ranks are here; waiting for the others", present, launch.world_size)
        time.sleep(0.02)
    raise TimeoutError(
        f"{present} of {launch.world_size} ranks came within comm.init_timeout_seconds = {comm.init_timeout_seconds}"
    )


def _describe_unlike(mine: str, others: str) -> str:
    own = [line for line in mine.splitlines() if line not in others.splitlines()]
    found = f": {', '.join(own)} here, otherwise elsewhere" if own else ""
    return f"the nodes were started with different options{found}; start all with the same files and arguments"


@contextmanager
def process_group(comm: Comm, *, launch: Launch, device: torch.device) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, NCCL for CUDA tensors; one process needs no torchrun."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Read when the first group is made: how many collectives the flight recorder remembers.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    options = {
        "backend": "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        "timeout": timedelta(seconds=comm.init_timeout_seconds),
    }
    if "RANK" in os.environ:  # $MASTER_ADDR alone may be there for other reasons, for example in a Slurm job
        dist.init_process_group(**options)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=launch.rank, world_size=launch.world_size, **options)
    # Not torn down after an error: that may wait for a rank that is gone, and the process ends anyway.
    yield
    dist.destroy_process_group()


def dump_collectives() -> bytes:
    """The last collectives of this process, as torch's flight recorders have them: JSON. NCCL has one of its own."""
    from torch._C import _distributed_c10d

    recorders = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # the latter not in torch for CPUs
    dumps = {name: getattr(_distributed_c10d, dump, None) for name, dump in recorders.items()}
    return json.dumps({name: json.loads(dump()) for name, dump in dumps.items() if dump}).encode()


def set_timeout(seconds: int) -> None:
    """Longest wait for a collective from now on: short where nothing slow remains, to find a rank that hangs."""
    for group in list(dist.distributed_c10d._world.pg_map):  # those of the axes too
        for backend in {group._get_backend(torch.device(kind)) for kind in group._device_types}:
            backend._set_default_timeout(timedelta(seconds=seconds))


def set_determinism(debug: Debug, *, launch: Launch, tensor_degree: int) -> None:
    """Seeds torch's generators, and with `debug.deterministic` forbids algorithms whose result varies.

    Ranks that hold other tokens or layers draw other numbers, those of one `tp` group, the mesh's innermost axis, the
    same: what they hold alike must stay alike. (For shards of one tensor DTensor has an offset of its own.)
    """
    torch.manual_seed(debug.seed + launch.rank // tensor_degree)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
