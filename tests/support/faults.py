"""Faults at a chosen place of a chosen step, injected inside the process that suffers them.

They strike in methods of the replica group, which `FaultyReplicaGroup` wraps, or in methods of torchft's own classes.
"""

import hashlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from torch import Tensor

from tests.support.runs import redirect_output
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.network import NoAnswerError
from torchtitan_clone.observe.logging import setup_logging
from torchtitan_clone.run.stopping import StopRequest

if TYPE_CHECKING:
    from torchtitan_clone.replicas.protocol import ReplicaGroup
    from torchtitan_clone.torchft.group import TorchFTGroup

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

logger = logging.getLogger("torchtitan_clone")

MIN_GRADIENT_ELEMENTS = 1000
"""An all-reduce of more elements than this is taken for one of gradients."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank of one replica group in the first attempt at one step."""

    kind: str
    """kill, late (kill after half a second), stop, hang, slow, nan, spoil (the weights) or exception."""
    place: str
    """Key of PLACES."""
    step: int
    group: int = 0
    rank: int = 0
    seconds: float = 3.0
    """How long "stop" and "slow" last."""
    returning: bool = False
    """Strikes the group when it has died and comes back, whatever the step."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A call at which a fault strikes."""

    owner: str
    """Name of a class of torchft, or ReplicaGroup."""
    method: str
    is_before: bool = False
    """Whether the fault strikes on entry to the method instead of on its return."""
    call: int = 1
    """Which call since the step began, counted from 1."""


PLACES = {
    "between": Place(owner="ReplicaGroup", method="begin_step", is_before=True),
    "quorum": Place(owner="Manager", method="wait_quorum"),
    "configure": Place(owner="ProcessGroupGloo", method="configure", is_before=True),
    "forward": Place(owner="ReplicaGroup", method="sum"),
    "gradients": Place(owner="ReplicaGroup", method="sum_gradients", is_before=True),
    "all_reduce": Place(owner="Manager", method="allreduce"),
    "heal_source": Place(owner="ProcessGroupGloo", method="send", call=6),
    "heal_target": Place(owner="ProcessGroupGloo", method="recv", call=6),
    "commit": Place(owner="Manager", method="should_commit", is_before=True),
    "committed": Place(owner="Manager", method="should_commit"),
}


class ArmedFault:
    """A fault that counts the calls at its place, and strikes in the right one."""

    def __init__(self, fault: Fault, *, group: "TorchFTGroup") -> None:
        self.place = PLACES[fault.place]
        self._fault = fault
        self._group = group
        self._calls = 0

    def wrap(self, method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Returns the method with the fault, which may strike before or after it."""

        @wraps(method)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            strikes = self._is_due(args)
            if strikes and self.place.is_before:
                strike(self._fault, args)
            result = method(*args, **kwargs)
            if strikes and not self.place.is_before:
                strike(self._fault, args)
            return result

        return call

    def _is_due(self, args: tuple[object, ...]) -> bool:
        if self._group.quorum.num_committed + 1 < self._fault.step and not self._fault.returning:
            return False
        if self._fault.place == "all_reduce":
            tensor = args[1]
            if not isinstance(tensor, Tensor) or tensor.numel() <= MIN_GRADIENT_ELEMENTS:
                return False
        self._calls += 1
        return self._calls == self.place.call


def strike(fault: Fault, args: tuple[object, ...]) -> None:
    """Makes the fault happen; `args` are those of the call."""
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
        (parameters,) = args
        assert isinstance(parameters, Iterable)
        next(iter(parameters)).grad.mul_(float("nan"))
    elif fault.kind == "spoil":
        (parameters,) = args
        assert isinstance(parameters, Iterable)
        for parameter in parameters:
            parameter.detach().mul_(5)
    elif fault.kind == "exception":
        raise RuntimeError("injected")


class ReplicaGroupWrapper:
    """Passes every call on to another replica group; subclasses override the methods that they look at."""

    def __init__(self, group: "ReplicaGroup") -> None:
        self._group = group

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)


class FaultyReplicaGroup(ReplicaGroupWrapper):
    """A replica group with faults, whose steps sleep for `pace` seconds; `at_close` is called when it has left."""

    def __init__(
        self, group: "ReplicaGroup", *, faults: list[ArmedFault], pace: float, at_close: Callable[[], None]
    ) -> None:
        super().__init__(group)
        self._faults = [fault for fault in faults if fault.place.owner == "ReplicaGroup"]
        self._pace = pace
        self._at_close = at_close

    def __getattr__(self, name: str) -> object:
        method = getattr(self._group, name)
        for fault in self._faults:
            if fault.place.method == name:
                method = fault.wrap(method)
        return method

    def record_samples(self, samples: range) -> None:
        """Sleeps first, so that a step takes about as long on any machine."""
        time.sleep(self._pace)
        self._group.record_samples(samples)

    def close(self) -> None:
        """Leaves the other groups, then calls `at_close`."""
        self._group.close()
        self._at_close()


def train_group_rank(
    argv: list[str], logs: list[Path], faults: list[Fault], group: int, folder: Path, pace: float
) -> None:
    """Trains one rank of a replica group, and ends the process as in production, without returning to the harness."""
    rank = int(os.environ["RANK"])
    redirect_output(logs[rank], append=True)
    import torchft  # optional, and slow to import

    from torchtitan_clone.torchft.group import TorchFTGroup

    def wrap(replica_group: "ReplicaGroup") -> "ReplicaGroup":
        assert isinstance(replica_group, TorchFTGroup)
        armed = [ArmedFault(each, group=replica_group) for each in faults if (each.group, each.rank) == (group, rank)]
        for fault in armed:
            owner = getattr(torchft, fault.place.owner, None)
            if owner is not None:
                setattr(owner, fault.place.method, fault.wrap(getattr(owner, fault.place.method)))

        def write_digests() -> None:
            tensors = replica_group.recovery.tensors.items()
            digests = {name: digest(tensor) for name, tensor in tensors}
            (folder / f"digests.{group}.{rank}").write_text(json.dumps(digests))

        return cast("ReplicaGroup", FaultyReplicaGroup(replica_group, faults=armed, pace=pace, at_close=write_digests))

    os._exit(run_entry_point(argv, wrap_replica_group=wrap))


def run_entry_point(argv: list[str], *, wrap_replica_group: Callable[["ReplicaGroup"], "ReplicaGroup"]) -> int:
    """Does what train.main does, with a wrapped replica group; returns the exit code."""
    from torchtitan_clone.train import run

    stop = StopRequest()
    stop.install()
    setup_logging(rank=int(os.environ["RANK"]), color=False)
    try:
        return run(load_config(argv), stop=stop, wrap_replica_group=wrap_replica_group)
    except (ConfigError, NoAnswerError) as error:
        print(f"error: {error}", flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:
        logger.exception("training failed")
        return 1


def digest(tensor: Tensor) -> str:
    """Returns a digest of the bits of a tensor."""
    return hashlib.blake2b(tensor.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
