"""How long a rank spends in collectives, its own part of them and its wait for others together; and in a link alone."""

import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_clone.parallel.trace import collective_name, let_look_inside

LINK_BYTES = 4 << 20
"""What is sent to measure a link."""
LINK_NOISE_SECONDS = {"cpu": 0.03, "cuda": 0.002}
"""By which times of equally fast links may differ: gloo's threads have to wait for a core."""
_ROUNDS = 3
SLOWER = 1.2
"""A rank is reported as slow if it takes this many times the median."""
SLOWER_LINK = 3
"""A link is reported as slow if it takes this many times the usual: between machines some are longer than others."""


class CollectiveTimer(TorchDispatchMode):
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
        _synchronize(self._device)
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.ScriptObject):
                dist.Work.unbox(value).wait()
            elif isinstance(value, torch.Tensor) and func.namespace == "_c10d_functional":
                torch.ops._c10d_functional.wait_tensor(value)
        _synchronize(self._device)
        self.seconds += time.perf_counter() - start
        return result


let_look_inside(CollectiveTimer)


def measure_link(*, local_rank: int, device: torch.device) -> tuple[int, float]:
    """From which rank this one receives in a ring of all ranks, and the seconds for LINK_BYTES; a collective.

    Neighbours in the ring are on different machines where there are several. A rank sends or receives, never both at
    once, so that a slow link shows at its own end only. The best of a few times counts.
    """
    local_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(local_ranks, local_rank)
    ring = sorted(range(len(local_ranks)), key=lambda rank: (local_ranks[rank], rank))
    place, last = ring.index(dist.get_rank()), len(ring) - 1
    before, after = ring[place - 1], ring[(place + 1) % len(ring)]
    # The links from every second place at once; the one that closes a ring of odd length comes last.
    turns = [2 if start == last and last % 2 == 0 else start % 2 for start in range(len(ring))]
    buffer = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(1 + _ROUNDS):
        for turn in sorted(set(turns)):
            if turn == turns[place]:
                _time(dist.P2POp(dist.isend, buffer, after), device=device)
            elif turn == turns[place - 1]:
                times.append(_time(dist.P2POp(dist.irecv, buffer, before), device=device))
            else:
                _time(None, device=device)
    return before, min(times[1:])  # the first one connects


def _time(transfer: dist.P2POp | None, *, device: torch.device) -> float:
    """Seconds of this rank's transfer, if it has one, from when all ranks are here."""
    # On the device: NCCL hangs where a transfer of some ranks is the first use of the group.
    dist.all_reduce(torch.zeros(1, device=device))
    _synchronize(device)
    start = time.perf_counter()
    for work in dist.batch_isend_irecv([transfer]) if transfer else ():
        work.wait()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """Seconds of one step of one rank, and of receiving LINK_BYTES from rank `source` in `link`.

    A rank that others wait for has little `communication` itself, which is mostly waiting. None if it is not measured.
    """

    host: str
    data: float
    total: float
    communication: float | None
    source: int
    link: float

    @property
    def computation(self) -> float | None:
        """Returns the seconds that remain."""
        return None if self.communication is None else self.total - self.data - self.communication


def step_breakdown(
    *, data: float, total: float, communication: float | None, source: int, link: float
) -> StepBreakdown:
    """Returns the breakdown of a step of this process."""
    return StepBreakdown(
        host=socket.gethostname(), data=data, total=total, communication=communication, source=source, link=link
    )


def describe_stragglers(ranks: list[StepBreakdown]) -> list[str]:
    """Returns a line for each rank whose data loading or computation is much slower than the median."""
    lines = []
    for activity in ("data", "computation"):
        seconds = [getattr(breakdown, activity) for breakdown in ranks]
        if None in seconds:
            continue
        median = statistics.median_low(seconds)
        step = max(breakdown.total for breakdown in ranks)
        lines += [
            f"rank {rank} ({ranks[rank].host}) is slow in {activity}: {own:.3f} s, "
            f"median {median:.3f} s, step {step:.3f} s"
            for rank, own in enumerate(seconds)
            if own > SLOWER * median and own - median > (SLOWER - 1) * step
        ]
    return lines


def describe_slow_links(ranks: list[StepBreakdown], *, noise_seconds: float) -> list[str]:
    """Returns a line for each link that is much slower than others of its kind, or for a rank with two such links."""
    is_local = [ranks[breakdown.source].host == breakdown.host for breakdown in ranks]
    usual = {
        kind: _usual([breakdown.link for breakdown, own in zip(ranks, is_local, strict=True) if own == kind])
        for kind in set(is_local)
    }
    slow = {
        (breakdown.source, rank): f"{breakdown.link:.4f} s, usual {usual[kind]:.4f} s"
        for rank, (breakdown, kind) in enumerate(zip(ranks, is_local, strict=True))
        if breakdown.link > SLOWER_LINK * usual[kind] and breakdown.link - usual[kind] > noise_seconds
    }
    lines = []
    names = [f"rank {rank} ({breakdown.host})" for rank, breakdown in enumerate(ranks)]
    slow_ranks = {receiver for _, receiver in slow} & {sender for sender, _ in slow}
    for (sender, receiver), seconds in slow.items():
        if receiver in slow_ranks:
            lines.append(f"{names[receiver]} is slow in communication, to receive and to send: {seconds}")
        elif sender not in slow_ranks:
            lines.append(f"the link from {names[sender]} to {names[receiver]} is slow: {seconds}")
    return lines


def _usual(seconds: list[float]) -> float:
    """Returns the lower tercile: of three links, two may be those of one slow rank."""
    return sorted(seconds)[(len(seconds) - 1) // 3]
