"""Runs functions as ranks in real processes.

The processes come from a forkserver that has torch loaded already: a rank starts in a tenth of a second instead of
several seconds. The parent hosts the rendezvous store, as torchrun's agent does, so that no free port is guessed.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "numpy",
        "pytest",
        "torch",
        "torch._dynamo",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torch.profiler",
        "torchtitan_clone.trainer",
    ]
)


class RankFailed(AssertionError):
    """A rank raised, or ended without an answer."""


def start_ranks(function, world_size, *args, env=None):
    """Starts `function(*args)` on every rank; returns the processes and the pipes their answers come through."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(world_size):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        ranks_env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # Several ranks, maybe more than GPUs: on the CPU, unless a test asks for GPUs.
            "CUDA_VISIBLE_DEVICES": "",
            **(env or {}),
        }
        process = _CONTEXT.Process(target=_rank_main, args=(theirs, ranks_env, function, args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, mine))
    # The store must outlive the ranks.
    started[0][0].store = store
    return started


def collect(started, *, timeout: float = 120):
    """The answers of all ranks, in their order; the first failure ends the others and is raised."""
    answers = {}
    deadline = time.monotonic() + timeout
    try:
        while len(answers) < len(started):
            pending = {pipe: rank for rank, (_, pipe) in enumerate(started) if rank not in answers}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(pending.values())} did not answer within {timeout} s")
            for pipe in ready:
                answers[pending[pipe]] = _answer(pipe, rank=pending[pipe])
    finally:
        for process, _ in started:
            process.join(5 if len(answers) == len(started) else 0)
            if process.is_alive():
                process.kill()
    return [answers[rank] for rank in range(len(started))]


def run_ranks(function, world_size, *args, timeout: float = 120, env=None):
    """Runs `function(*args)` on every rank and returns the answers in the order of the ranks."""
    return collect(start_ranks(function, world_size, *args, env=env), timeout=timeout)


def _answer(pipe, *, rank):
    try:
        failed, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankFailed(f"rank {rank} ended without an answer") from None
    if failed:
        raise RankFailed(f"rank {rank} failed:\n{value}")
    return value


def _rank_main(pipe, env, function, args):
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        answer = (False, function(*args))
    except BaseException:  # noqa: BLE001, whatever it was, the parent shows it
        answer = (True, traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        # Plain pickle: multiprocessing's own would hand tensors over in memory that ends with this process.
        pipe.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
