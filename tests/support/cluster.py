"""Replica groups in real processes on this machine, with a lighthouse; groups that die are started again."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from tests.support.attempts import GroupResults
from tests.support.attempts import committed_once as committed_once  # used together with Cluster
from tests.support.faults import Fault, train_group_rank
from tests.support.harness import StartedRank, start_ranks
from tests.support.runs import GLOBAL_BATCH_SIZE, options
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.torchft.lighthouse import start_lighthouse

HEARTBEAT_MS = 700
TIMEOUT_MS = 1500
JOIN_MS = 2500
"""Longer than a group may wait in vain: otherwise groups that return continue without the one that survived."""


def serve_lighthouse(fault_tolerance: FaultTolerance, port: int, pipe: Connection) -> None:
    """Runs a lighthouse in this process and sends its address."""
    lighthouse = start_lighthouse(fault_tolerance, port=port)
    pipe.send(lighthouse.url)
    threading.Event().wait()


@dataclass(frozen=True)
class Group:
    """The processes of one start of one replica group."""

    ranks: list[StartedRank]

    @property
    def codes(self) -> list[int | None]:
        """Exit codes of the ranks; None for those that still run."""
        return [rank.process.exitcode for rank in self.ranks]

    def signal(self, number: int) -> None:
        """Sends a signal to all ranks."""
        for process in (rank.process for rank in self.ranks):
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is not known yet
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, number)

    def end(self) -> None:
        """Kills all ranks, as an agent does when one of its ranks has failed."""
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.process.join(10)


class Cluster(GroupResults):
    """Several replica groups that train one run in `folder`; a group that dies is started again.

    `revive_seconds` pass before a group that died is started again. `pace` is how long every step sleeps, so that a
    step takes about as long on any machine. `least` is the lighthouse's minimum of replica groups, if it differs from
    that of the groups. `changes` are options of the run, in which each rank has one micro-batch if all groups train.
    """

    def __init__(
        self,
        corpus: Path,
        folder: Path,
        *,
        groups: int,
        ranks: int = 1,
        revive_seconds: float = 0.0,
        pace: float = 0.0,
        least: int | None = None,
        **changes: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, groups=groups)
        self.corpus = corpus
        self.ranks = ranks
        self.least = least
        self.env: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.running: dict[int, Group] = {}
        self.finished: dict[int, list[int | None]] = {}
        self.revive_seconds = revive_seconds
        self._pace = pace
        rows = int(str(changes.get("training__global_batch_size", GLOBAL_BATCH_SIZE)))
        self._changes: dict[str, object] = {
            "training__local_batch_size": rows // (groups * ranks),
            "fault_tolerance__enable": True,
            "fault_tolerance__group_size": groups,
            "fault_tolerance__heartbeat_timeout_ms": HEARTBEAT_MS,
            "fault_tolerance__process_group_timeout_ms": TIMEOUT_MS,
            "fault_tolerance__join_timeout_ms": JOIN_MS,
            "fault_tolerance__stall_factor": 20,
            **changes,
        }
        self._lighthouse, self.address = self._start_lighthouse(port=0)

    def _start_lighthouse(self, *, port: int) -> tuple[ForkServerProcess, str]:
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe()
        fault_tolerance = load_config(options(self.corpus, self.folder, **self._changes)).fault_tolerance
        if self.least is not None:
            fault_tolerance = replace(fault_tolerance, min_replica_size=self.least)
        process = context.Process(target=serve_lighthouse, args=(fault_tolerance, port, sender), daemon=True)
        process.start()
        sender.close()
        return process, receiver.recv()

    @property
    def lighthouse_pid(self) -> int:
        """Process id of the lighthouse."""
        return self._lighthouse.pid or 0

    def restart_lighthouse(self, *, seconds: float) -> None:
        """Kills the lighthouse, and starts another at the same address `seconds` later."""
        self.stop_lighthouse()
        time.sleep(seconds)
        self.start_lighthouse_again()

    def stop_lighthouse(self) -> None:
        """Kills the lighthouse."""
        self._lighthouse.kill()
        self._lighthouse.join()

    def start_lighthouse_again(self) -> None:
        """Starts another lighthouse at the same address."""
        self._lighthouse, self.address = self._start_lighthouse(port=int(self.address.rpartition(":")[2]))

    def start(self, group: int, *, faults: Iterable[Fault] = (), **changes: object) -> None:
        """Starts one replica group; `changes` are options of this group only."""
        argv = options(self.corpus, self.folder, **{**self._changes, "fault_tolerance__replica_id": group, **changes})
        self.starts.append((time.time(), group))
        logs = [self.folder / f"group{group}.rank{rank}.log" for rank in range(self.ranks)]
        env = {"TORCHFT_LIGHTHOUSE": self.address, "RUST_LOG": "error", **self.env}
        what = (argv, logs, list(faults), group, self.folder, self._pace)
        self.running[group] = Group(start_ranks(train_group_rank, self.ranks, *what, env=env))

    def start_all(self, *, faults: Iterable[Fault] = ()) -> Self:
        """Starts all replica groups with these faults, which are given in the order of their steps."""
        self.faults = list(faults)
        for group in range(self.groups):
            self.start(group, faults=[fault for fault in self.faults if not fault.returning])
        return self

    def faults_left(self, group: int) -> list[Fault]:
        """Returns the faults that a group which starts again may still meet; at most one is for its return."""
        reached = max(self.step_of(each) for each in range(self.groups))
        later = [fault for fault in self.faults if fault.step > reached + 1 and not fault.returning]
        returning = [fault for fault in self.faults if fault.returning and fault.group == group]
        for fault in returning[:1]:
            self.faults.remove(fault)
        return [*later, *returning[:1]]

    def watch_over(self, *, timeout: float = 120, until: Callable[[], bool] | None = None) -> Self:
        """Starts again what dies, until all groups have finished or `until()` holds."""
        deadline = time.monotonic() + timeout
        dead: dict[int, float] = {}
        while self.running or dead:
            assert time.monotonic() < deadline, f"not finished in {timeout} s:\n{self.log}"
            if until is not None and until():
                return self
            dead |= dict.fromkeys(self._remove_ended(), time.monotonic() + self.revive_seconds)
            for group in [group for group, moment in dead.items() if time.monotonic() >= moment]:
                del dead[group]
                self.start(group, faults=self.faults_left(group))
            time.sleep(0.01)
        return self

    def _remove_ended(self) -> list[int]:
        """Moves groups that have ended out of `running`; returns those that died."""
        died = []
        for group, started in list(self.running.items()):
            codes = started.codes
            if all(code == 0 for code in codes):
                self.finished[group] = codes
                del self.running[group]
            elif any(code not in (None, 0) for code in codes):
                started.end()
                assert 2 not in codes, self.log
                self.deaths.append((time.time(), group, started.codes))
                del self.running[group]
                died.append(group)
        return died

    def kill(self, *groups: int) -> None:
        """Sends SIGKILL to all ranks of these groups, which are then not started again."""
        for group in groups:
            self.running.pop(group).end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self.running)
        self._lighthouse.kill()
