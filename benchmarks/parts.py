"""Divides the seconds of a training step on a CPU by what its thread does: products, copies, waiting for ranks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Work
from torch.profiler import ProfilerActivity, profile, record_function

from torchtitan_clone.comm.collectives import Messages

STEP, WAIT = "parts: step", "parts: wait"
WAITING = "waiting for ranks"
_ATTENTION = ("attend", "document_attention", "context_attention")
_BACKWARD = "GeneratedBackwardFor_torchtitan_clone_"
"""How autograd names an operator of this package in forward."""
PARTS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "torchtitan_clone::faster_linear"),
    "attention": (
        "aten::_scaled_dot_product",
        *(f"{place}{name}" for place in ("torchtitan_clone::", _BACKWARD) for name in _ATTENTION),
    ),
    WAITING: (WAIT, "_c10d_functional::wait_tensor"),
    "collectives": ("torchtitan_clone::exchange", "c10d::", "_c10d_functional::", "gloo:", "fsdp::all_gather_copy_in"),
    "copies": ("aten::copy_", "aten::cat", "aten::stack", "aten::clone", "aten::index", "aten::gather", "fsdp::"),
    "other operators": ("aten::", "torchtitan_clone::"),
}
"""Parts, and how the names of their operators begin; the first that fits has an operator. The rest is `HOST`."""
HOST = "host"
"""Python, autograd and the dispatch of operators, also that of DTensor."""


def part_of(name: str) -> str:
    """Returns the part that an event of the profiler belongs to."""
    return next((part for part, beginnings in PARTS.items() if name.startswith(beginnings)), HOST)


def record_waiting() -> None:
    """Lets the profiler see where this process waits for messages and for gloo."""
    for kind in (Messages, Work):
        kind.wait = _recorded(kind.wait)


def _recorded(wait: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: object, **kwargs: object) -> object:
        with record_function(WAIT):
            return wait(*args, **kwargs)

    return recorded


def seconds_by_part(step: Callable[[], object]) -> dict[str, float]:
    """Returns the seconds of each part of a call, which sum to those of the call; profiling prolongs the host's."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        step()
    events = profiler.events() or []
    (thread,) = (event.thread for event in events if event.name == STEP)
    seconds = Counter[str](dict.fromkeys([*PARTS, HOST], 0))
    for event in events:
        if event.thread == thread:
            seconds[part_of(event.name)] += event.self_cpu_time_total / 1e6
    return dict(seconds)
