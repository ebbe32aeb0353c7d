"""Faults at a chosen place of a chosen step, struck from inside the process that suffers them."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass

import torch

GRADIENTS = 1000
"""Sums of more numbers than this are of gradients."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank of one replica group in the first attempt at one step."""

    kind: str
    """kill, late (kill after half a second), stop, hang, slow, nan or exception."""
    place: str
    """Key of PLACES."""
    step: int
    group: int = 0
    rank: int = 0
    seconds: float = 3.0
    """How long "stop" and "slow" take."""
    returning: bool = False
    """Meant for the group when it has died and comes back, whatever the step."""


# Where a fault strikes: on entry to a method, or with "after" on its return; the count is of calls since the step came.
PLACES = {
    "between": ("TorchFTGroup", "begin_step", "before", 1),
    "quorum": ("Manager", "_async_quorum", "after", 1),
    "configure": ("ProcessGroupGloo", "configure", "before", 1),
    "forward": ("TorchFTGroup", "sum", "after", 1),
    "gradients": ("TorchFTGroup", "sum_gradients", "before", 1),
    "all_reduce": ("Manager", "allreduce", "after", 1),
    "heal_source": ("ProcessGroupGloo", "send", "after", 6),
    "heal_target": ("ProcessGroupGloo", "recv", "after", 6),
    "commit": ("Manager", "should_commit", "before", 1),
    "committed": ("Manager", "should_commit", "after", 1),
}


def strike(fault: Fault, arguments: tuple) -> None:
    """Lets it happen."""
    print(f"fault: {fault}", flush=True)
    if fault.kind in ("kill", "late"):
        time.sleep(0.5 * (fault.kind == "late"))
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "hang":
        while True:
            time.sleep(1)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "nan":
        for parameter in arguments[1]:
            parameter.grad.mul_(float("nan"))
            break
    elif fault.kind == "exception":
        raise RuntimeError("injected")


def install(faults: list[Fault], *, group: int, rank: int) -> None:
    """Makes those of the faults happen that are meant for this process."""
    manager = []
    remember(manager)
    for fault in faults:
        if (fault.group, fault.rank) == (group, rank):
            watch(fault, manager)


def remember(manager: list) -> None:
    """Keeps the process's manager, which knows the step."""
    from torchft import Manager

    build = Manager.__init__

    def __init__(self, *args, **kwargs):
        build(self, *args, **kwargs)
        manager.append(self)

    Manager.__init__ = __init__


def watch(fault: Fault, manager: list) -> None:
    """Wraps the method at whose call the fault strikes."""
    import torchft

    from torchtitan_clone.fault_tolerance import torchft_group as ours

    kind, name, when, count = PLACES[fault.place]
    owner = getattr(torchft, kind, None) or getattr(ours, kind)
    method = getattr(owner, name)
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        reached = manager[0].current_step() + 1 if manager else 0
        is_due = (reached >= fault.step or fault.returning) and is_meant(fault, args)
        calls += is_due
        if is_due and calls == count and when == "before":
            strike(fault, args)
        result = method(*args, **kwargs)
        if is_due and calls == count and when == "after":
            strike(fault, args)
        return result

    setattr(owner, name, wrapped)


def is_meant(fault: Fault, arguments: tuple) -> bool:
    """Whether this call is of the kind that the fault waits for."""
    if fault.place == "all_reduce":
        return isinstance(arguments[1], torch.Tensor) and arguments[1].numel() > GRADIENTS
    return True
