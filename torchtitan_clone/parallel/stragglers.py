"""Finds ranks and links that are slower than others; links are measured separately, around a ring of all ranks."""

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.comm.collectives import is_exchange, messages_of
from torchtitan_clone.comm.json_collectives import all_gather_json, gather_json
from torchtitan_clone.comm.tracing import Kwargs, axes_of, collective_name, look_inside_operations
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.documents import Value
from torchtitan_clone.parallel.mesh import Mesh
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.torch_compat import Operator, TorchDispatchMode, tree_leaves, wait_tensor

SLOW_RANK_FACTOR = 1.2  # of the median
SLOW_LINK_FACTOR = 3  # of the usual time: between machines some links are longer than others
LINK_BYTES = 4 << 20
LINK_NOISE_SECONDS = {"cpu": 0.03, "cuda": 0.002}
"""By which times of equally fast links may differ: gloo's threads wait for a core."""

MAX_SPANS = 20_000
"""Collectives of all ranks that a timeline has; of each rank the longest."""
Span = tuple[str, float, float]
"""A collective's axes and name, and its start and duration in seconds."""


class CollectiveTimer(TorchDispatchMode):
    """Times the collectives that run inside it, and waits for each of them: none overlaps."""

    def __init__(self, device: torch.device, *, group_axes: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self._device = device
        self._group_axes = group_axes
        self._created = time.perf_counter()
        self.spans: list[Span] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch compiles functions inside the mode; FlexAttention runs in no other way there."""
        return True

    @property
    def seconds(self) -> float:
        """Sum of the durations."""
        return sum(seconds for _, _, seconds in self.spans)

    def __enter__(self) -> "CollectiveTimer":
        look_inside_operations(CollectiveTimer)
        return super().__enter__()

    def __torch_dispatch__(self, func: Operator, types: object, args: tuple = (), kwargs: Kwargs = None) -> object:
        if (name := collective_name(func, args)) is None:
            return func(*args, **(kwargs or {}))
        _synchronize(self._device)
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        for work in [messages_of(result)] if is_exchange(func) else works_of(result):
            work.wait()
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and func.namespace == "_c10d_functional":
                wait_tensor(value)
        _synchronize(self._device)
        axes = "/".join(axes_of(args, group_axes=self._group_axes)) or "replica groups"
        self.spans.append((f"{axes} {name}", start - self._created, time.perf_counter() - start))
        return result


def works_of(result: object) -> list[dist.Work]:
    """Returns what to wait for; nothing of a collective of NCCL that torch waits for itself."""
    boxed = [value for value in tree_leaves(result) if isinstance(value, torch.ScriptObject)]
    return [work for work in map(dist.Work.unbox, boxed) if work is not None]


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """Seconds that one rank spent in a step, and seconds in which LINK_BYTES from rank `source` of the ring arrive.

    `data` is waiting for the batch; `communication` is mostly waiting for slower ranks, None if it was not measured.
    """

    host: str
    data: float
    total: float
    communication: float | None
    source: int
    link: float

    @property
    def computation(self) -> float | None:
        return None if self.communication is None else self.total - self.data - self.communication

    @staticmethod
    def from_json(value: Value) -> "StepBreakdown":
        """Returns the breakdown whose fields a rank sent as JSON. DocumentError if one is missing or not valid."""
        table = value.table("host", "data", "total", "communication", "source", "link")
        communication = table["communication"]
        return StepBreakdown(
            host=table["host"].text(),
            data=table["data"].number(),
            total=table["total"].number(),
            communication=None if communication.value is None else communication.number(),
            source=table["source"].integer(),
            link=table["link"].number(),
        )


@dataclass(frozen=True, kw_only=True)
class StragglerReport:
    """What a measured step found: a line for each slow rank and link, the same on all ranks, and the measurements.

    `spans` are the collectives by rank, on rank 0 only; none of a step without a timer.
    """

    lines: Sequence[str] = ()
    ranks: Sequence[StepBreakdown] = ()
    spans: Sequence[Sequence[Span]] = field(default_factory=list[list[Span]])


class StragglerMonitor:
    """Reports slow ranks and slow links every comm.straggler_freq steps.

    `can_time_collectives` is False for compiled code and pipelines, whose steps timing would change.
    """

    def __init__(self, comm: Comm, *, launch: Launch, device: torch.device, can_time_collectives: bool):
        self._freq = comm.straggler_freq if launch.world_size > 1 else 0
        self._launch = launch
        self._device = device
        self._can_time_collectives = can_time_collectives

    def timer(self, step: int, *, mesh: Mesh) -> CollectiveTimer | None:
        """Returns the context in which to run this step; None for most steps, which are not measured."""
        if not (self._can_time_collectives and self._is_due(step)):
            return None
        return CollectiveTimer(self._device, group_axes=mesh.group_axes())

    def report(
        self, step: int, *, timer: CollectiveTimer | None, data_seconds: float, total_seconds: float
    ) -> StragglerReport:
        """Returns what was measured, nothing for most steps; a collective at steps that are due."""
        if not self._is_due(step):
            return StragglerReport()
        source, link = measure_link(local_rank=self._launch.local_rank, device=self._device)
        own = StepBreakdown(
            host=socket.gethostname(), data=data_seconds, total=total_seconds, source=source, link=link,
            communication=timer.seconds if timer else None,
        )  # fmt: skip
        ranks = [StepBreakdown.from_json(value) for value in all_gather_json(asdict(own))]
        noise = LINK_NOISE_SECONDS[self._device.type]
        lines = [*describe_stragglers(ranks), *describe_slow_links(ranks, noise_seconds=noise)]
        return StragglerReport(lines=lines, ranks=ranks, spans=_gather_spans(timer) if timer else [])

    def _is_due(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0


def _gather_spans(timer: CollectiveTimer) -> list[list[Span]]:
    """Returns the longest collectives of each rank on rank 0; a collective."""
    longest = sorted(timer.spans, key=lambda span: span[2])[-max(1, MAX_SPANS // dist.get_world_size()) :]
    own = [(name, round(start, 6), round(seconds, 6)) for name, start, seconds in longest]
    triples = [[span.items(count=3) for span in rank.items()] for rank in gather_json(own)]
    return [[(name.text(), start.number(), size.number()) for name, start, size in rank] for rank in triples]


def describe_stragglers(ranks: list[StepBreakdown]) -> list[str]:
    """Returns a line for each rank that is much slower than the median in loading data or computing."""
    lines = []
    step = max(rank.total for rank in ranks)
    computation = [rank.computation for rank in ranks if rank.computation is not None]
    for phase, seconds in (("data", [rank.data for rank in ranks]), ("computation", computation)):
        if len(seconds) < len(ranks):
            continue
        median = statistics.median_low(seconds)
        lines += [
            f"rank {index} ({rank.host}) is slow in {phase}: {own:.3f} s, median {median:.3f} s, step {step:.3f} s"
            for index, (rank, own) in enumerate(zip(ranks, seconds, strict=True))
            if own > SLOW_RANK_FACTOR * median and own - median > (SLOW_RANK_FACTOR - 1) * step
        ]
    return lines


def describe_slow_links(ranks: list[StepBreakdown], *, noise_seconds: float) -> list[str]:
    """Returns a line for each link much slower than others of its kind, or for the rank where two of them meet."""
    slow = {}
    for is_local in (True, False):  # links within a machine, links between machines
        kind = [rank for rank, own in enumerate(ranks) if (ranks[own.source].host == own.host) == is_local]
        links = {(ranks[rank].source, rank): ranks[rank].link for rank in kind}
        # A third of the links are at most this slow: of three links, two may be those of one slow rank.
        usual = sorted(links.values())[(len(links) - 1) // 3] if links else 0.0
        slow |= {
            link: f"{seconds:.4f} s, usual {usual:.4f} s"
            for link, seconds in links.items()
            if seconds > SLOW_LINK_FACTOR * usual and seconds - usual > noise_seconds
        }
    lines = []
    names = [f"rank {index} ({rank.host})" for index, rank in enumerate(ranks)]
    slow_ranks = {receiver for _, receiver in slow} & {sender for sender, _ in slow}
    for (sender, receiver), seconds in sorted(slow.items(), key=lambda item: item[0][1]):
        if receiver in slow_ranks:
            lines.append(f"{names[receiver]} is slow in communication, to receive and to send: {seconds}")
        elif sender not in slow_ranks:
            lines.append(f"the link from {names[sender]} to {names[receiver]} is slow: {seconds}")
    return lines


def measure_link(*, local_rank: int, device: torch.device) -> tuple[int, float]:
    """Returns the rank that this one receives from in a ring of all ranks, and the seconds for LINK_BYTES.

    A collective. A rank never sends and receives at once, so that a slow link shows at its own end only.
    """
    local_ranks = [value.integer() for value in all_gather_json(local_rank)]
    ring = sorted(range(len(local_ranks)), key=lambda rank: (local_ranks[rank], rank))
    place = ring.index(dist.get_rank())
    last = len(ring) - 1
    # The links from every second place run at once; the one that closes a ring of odd length runs last.
    turns = [2 if start == last and last % 2 == 0 else start % 2 for start in range(len(ring))]
    buffer = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(4):
        for turn in sorted(set(turns)):
            if turn == turns[place]:
                _time(dist.P2POp(dist.isend, buffer, ring[place - last]), device=device)
            elif turn == turns[place - 1]:
                times.append(_time(dist.P2POp(dist.irecv, buffer, ring[place - 1]), device=device))
            else:
                _time(None, device=device)
    return ring[place - 1], min(times[1:])  # the first one connects


def _time(operation: dist.P2POp | None, *, device: torch.device) -> float:
    """Returns the seconds of this rank's transfer, if any, from the time at which all ranks are ready."""
    # On the device: NCCL hangs if a transfer between some ranks is the first use of the group.
    dist.all_reduce(torch.zeros(1, device=device))
    _synchronize(device)
    start = time.perf_counter()
    for work in dist.batch_isend_irecv([operation]) if operation else ():
        work.wait()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
