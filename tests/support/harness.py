"""Runs functions as ranks in real processes.

They come from a forkserver that has torch loaded, which saves seconds; the parent hosts the rendezvous store.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_clone.network import LOOPBACK, serve_store

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "numpy", "pytest", "torch", "torch._dynamo", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.profiler", "tests.support.sabotage",
    "torchtitan_clone.trainer", "tests.support.preloaded",
]  # fmt: skip
"""Modules that the forkserver imports once for all processes, of which the last must stay the last."""
_CONTEXT.set_forkserver_preload(PRELOADED)

_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    # Python 3.11's forkserver does not inherit sys.path: without this it could load another, installed copy.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))


class RankFailed(AssertionError):
    """A rank raised, or ended without returning a value."""


@dataclass(frozen=True, kw_only=True)
class StartedRank:
    """A process of one rank and the pipe that its return value comes through."""

    process: ForkServerProcess
    pipe: Connection
    store: dist.TCPStore  # of the rendezvous; must outlive the ranks


def start_ranks(
    function: Callable[..., object], world_size: int, *args: object, env: Mapping[str, str] | None = None
) -> list[StartedRank]:
    """Starts `function(*args)` on every rank."""
    store = serve_store(LOOPBACK)
    started = []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        rank_env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # There may be more ranks than GPUs: ranks use the CPU unless the caller asks for GPUs.
            "CUDA_VISIBLE_DEVICES": "",
            **(env or {}),
        }
        process = _CONTEXT.Process(target=_rank_main, args=(sender, rank_env, function, args), daemon=True)
        process.start()
        sender.close()
        started.append(StartedRank(process=process, pipe=receiver, store=store))
    return started


def collect(started: list[StartedRank], *, timeout: float = 120) -> list[Any]:
    """Returns the values of all ranks in rank order; the first failure ends the other ranks and is raised."""
    values: dict[int, object] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(values) < len(started):
            pending = [rank for rank in range(len(started)) if rank not in values]
            ready = wait([started[rank].pipe for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {pending} did not return within {timeout} s")
            for rank in pending:
                if started[rank].pipe in ready:
                    values[rank] = _receive(started[rank], rank=rank)
    finally:
        for each in started:
            each.process.join(5 if len(values) == len(started) else 0)
            if each.process.is_alive():
                each.process.kill()
    return [values[rank] for rank in range(len(started))]


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `function(*args)` on every rank and returns the values in rank order."""
    return collect(start_ranks(function, world_size, *args, env=env), timeout=timeout)


def _receive(started: StartedRank, *, rank: int) -> object:
    try:
        failed, value = pickle.loads(started.pipe.recv_bytes())
    except EOFError:
        started.process.join(5)
        code = started.process.exitcode
        raise RankFailed(f"rank {rank} ended without returning a value, with exit code {code}") from None
    if failed:
        raise RankFailed(f"rank {rank} failed:\n{value}")
    return value


def _rank_main(
    pipe: Connection, env: Mapping[str, str], function: Callable[..., object], args: tuple[object, ...]
) -> None:
    faulthandler.enable(2)  # the descriptor, which redirect_output() changes
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        outcome = (False, function(*args))
    except BaseException:  # noqa: BLE001, the parent shows any error
        outcome = (True, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        # Plain pickle: multiprocessing's own would hand tensors over in memory that ends with this process.
        pipe.send_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
