"""Programs that live at the same time and train their steps in turn, so that the machine's drift affects all alike.

A program is a process that trains a model. It calls `turn()` where a step ends and the next may begin: the call reports
the step and returns once the program's next turn has come.
"""

import ctypes
import json
import math
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

ROOT = Path(__file__).resolve().parents[1]
Turn = Callable[..., None]
Step = dict[str, Any]
T = TypeVar("T")


def serve_turns() -> Turn:
    """Returns this process's turn(), whose arguments the report has too; what is printed goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = os.fdopen(0, closefd=False)
    start = [time.perf_counter(), time.process_time()]

    def turn(**more: object) -> None:
        _wait_for_gpu()
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        replies.write(json.dumps({"wall": wall, "cpu": cpu, "gib": _peak_gib(), **more}) + "\n")
        replies.flush()
        if not commands.readline():
            os._exit(0)
        start[:] = time.perf_counter(), time.process_time()

    return turn


def serve_turns_of_ranks(ranks: int) -> Turn:
    """Returns this rank's turn(): rank 0 starts the others with its command, which follow it in every collective.

    Call it before CUDA is initialized: with fewer GPUs than ranks the ranks run on the CPU.
    """
    import torch

    if ranks > 1 and torch.cuda.device_count() < ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    is_first = os.environ.get("RANK", "0") == "0"
    turn = serve_turns() if is_first else _go_on
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
    if is_first:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        os.environ |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(1, ranks):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            subprocess.Popen([sys.executable, *sys.argv], env=environment)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    return turn


def _go_on(**_: object) -> None:
    """The turn of a rank that waits for rank 0 in collectives."""


def _cuda() -> Any:
    """Returns torch.cuda if this process uses it, else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _wait_for_gpu() -> None:
    if (cuda := _cuda()) is not None:
        cuda.synchronize()


def _peak_gib() -> float:
    cuda = _cuda()
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20 if cuda is None else cuda.max_memory_reserved() / 2**30


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command that serves turns, its variables beyond this process's, and the file for what it prints."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class Running:
    """A started program."""

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self._log = program.log
        self._started = time.perf_counter()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **program.environment}
        with program.log.open("w") as log:
            self._process = subprocess.Popen(
                program.command, env=environment, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log,
            )  # fmt: skip
        self.ready = self._reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def step(self) -> Step:
        """Lets the program train one step; returns its wall and CPU seconds and the peak memory until then."""
        self.begin()
        return self.end()

    def begin(self) -> None:
        """Lets the program train one step, and returns at once: several programs can train at the same time."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> Step:
        """Returns what step() does of the step that begin() began."""
        return self._reply()

    @property
    def age_seconds(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started

    def _reply(self) -> Step:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text().splitlines()[-15:]
            raise SystemExit(f"error: {self.name} ended early; its last lines:\n" + "\n".join(lines))
        return cast("Step", json.loads(line))


def take_turns(programs: Sequence[Running], *, rounds: int) -> dict[str, list[Step]]:
    """Trains one step of each program a round, in an order that changes; returns the steps by program."""
    return alternate({program.name: program.step for program in programs}, rounds=rounds)


def alternate(steps: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """Takes each step once a round, in an order that changes; returns what they return, by name."""
    taken: dict[str, list[T]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            taken[name].append(steps[name]())
    return taken


def timed(function: Callable[[], T]) -> tuple[T, Step]:
    """Returns the result of a function, and the wall and CPU seconds that it takes in this process and on its GPU."""
    _wait_for_gpu()
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    _wait_for_gpu()
    return result, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def median_of(steps: Iterable[Step], *, clock: str = "wall") -> float:
    """Returns the median of the steps' seconds."""
    return statistics.median(step[clock] for step in steps)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Quartiles over rounds of one program's time over another's in the same round, and the median's standard error."""

    low: float
    median: float
    high: float
    error: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


def ratio_of(steps: Iterable[Step], others: Iterable[Step], *, clock: str = "wall") -> Ratio:
    """Returns the ratio of the steps' time to the others', round by round. `clock` is "wall" or "cpu"."""
    ratios = [step[clock] / other[clock] for step, other in zip(steps, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    # As of a normal distribution with these quartiles: outliers, of which a shared machine has many, count little.
    error = 1.253 * (high - low) / 1.349 / math.sqrt(len(ratios))
    return Ratio(low=low, median=median, high=high, error=error)


def processor_name(*, uses_gpu: bool = False) -> str:
    """Returns what this machine computes with: its processor, and its GPU if this process or its programs use it."""
    fields = dict(line.split(":", 1) for line in _cpuinfo() if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(names.get("flags", "").split())
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in flags]
    model = names.get("model name", platform.processor() or platform.machine())
    if uses_gpu:
        import torch  # noqa: F401, _cuda() finds it
    gpu = "" if (cuda := _cuda()) is None else f"{cuda.get_device_name()}; "
    return f"{gpu}{model}, {len(os.sched_getaffinity(0))} cores, {' '.join(units) or 'no vector units named'}"


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().split("\n\n")[0].splitlines() if file.exists() else []
