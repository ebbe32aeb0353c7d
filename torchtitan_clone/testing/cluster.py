"""Replica groups in real processes on this machine, with a lighthouse; they are watched, revived, and looked into."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.lighthouse import start_lighthouse
from torchtitan_clone.testing.harness import start_ranks
from torchtitan_clone.testing.runs import options

HEARTBEAT_MS = 700
TIMEOUT_MS = 1500
JOIN_MS = 2500
"""Longer than a group may wait in vain, or those that return go on without the one that has lived."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A gap between two steps that one process committed; times as time.time()."""

    seconds: float
    """In excess of the median gap."""
    deaths: int
    """Of other groups, in that time."""
    group: int
    start: float
    end: float


def rank_of_group(argv: list[str], logs: list[Path], faults: list, group: int, folder: Path, pace: float) -> None:
    """What one rank of a replica group does; it ends as in production, without a way back to the harness."""
    from torchtitan_clone import trainer
    from torchtitan_clone.testing import faults as injection
    from torchtitan_clone.train import exit_process

    rank = int(os.environ["RANK"])
    log = os.open(logs[rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    injection.install(faults, group=group, rank=rank)
    train, train_step = trainer.Trainer.train, trainer.Trainer.train_step

    def paced_step(self, step: int):
        time.sleep(pace)
        return train_step(self, step)

    def train_and_tell(self) -> bool:
        complete = train(self)
        tensors = self._healing().tensors
        for kind in ("", "model/", "outer/global/"):
            part = {name: tensor for name, tensor in tensors.items() if name.startswith(kind)}
            (folder / f"digest.{kind.replace('/', '_')}.{group}.{rank}").write_text(digest(part))
        return complete

    trainer.Trainer.train, trainer.Trainer.train_step = train_and_tell, paced_step
    exit_process(argv)


def serve(fault_tolerance: FaultTolerance, port: int, pipe) -> None:
    """A lighthouse in a process of its own."""
    lighthouse = start_lighthouse(fault_tolerance, port=port)
    pipe.send(lighthouse.address())
    threading.Event().wait()


def digest(tensors: dict) -> str:
    """Of the bits of all tensors."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


class Group:
    """One start of one replica group."""

    def __init__(self, argv: list[str], *, group: int, ranks: int, faults: list, folder: Path, pace: float, env: dict):
        self.logs = [folder / f"group{group}.rank{rank}.log" for rank in range(ranks)]
        # Kept as they are: the ranks meet in a store that lives as long as these.
        self._started = start_ranks(rank_of_group, ranks, argv, self.logs, faults, group, folder, pace, env=env)
        self.processes = [rank.process for rank in self._started]

    @property
    def codes(self) -> list[int | None]:
        """Exit codes of the ranks; None for those alive."""
        return [process.exitcode for process in self.processes]

    def signal(self, number: int) -> None:
        """Sends a signal to all ranks."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # it is gone, and its exit code is still on its way
                if process.exitcode is None:
                    os.kill(process.pid, number)

    def end(self) -> None:
        """As an agent does when one of its ranks has failed."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(10)


class Cluster:
    """Several replica groups that train one run in `folder`; one that dies is started again.

    `pace` is how long a step sleeps, so that it takes about as long on any machine; `least` is the lighthouse's own
    minimum, where it is not that of the groups.
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
        **changes,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.groups, self.ranks, self.revive_seconds = folder, groups, ranks, revive_seconds
        self.pace, self.least = pace, least or changes.get("fault_tolerance__min_replica_size", 1)
        self.changes = {
            "training__local_batch_size": 2,
            "fault_tolerance__enable": True,
            "fault_tolerance__group_size": groups,
            "fault_tolerance__heartbeat_timeout_ms": HEARTBEAT_MS,
            "fault_tolerance__process_group_timeout_ms": TIMEOUT_MS,
            "fault_tolerance__join_timeout_ms": JOIN_MS,
            "fault_tolerance__stall_factor": 20,
            **changes,
        }
        self.corpus = corpus
        self.env: dict[str, str] = {}
        self.faults: list = []
        self.deaths: list[tuple[float, int, list]] = []
        self.starts: list[tuple[float, int]] = []
        self.running: dict[int, Group] = {}
        self.finished: dict[int, list] = {}
        self.start_lighthouse(port=0)

    def start_lighthouse(self, *, port: int) -> None:
        """Starts it, again too."""
        context = multiprocessing.get_context("forkserver")
        mine, theirs = context.Pipe()
        options = FaultTolerance(
            heartbeat_timeout_ms=self.changes["fault_tolerance__heartbeat_timeout_ms"],
            join_timeout_ms=self.changes["fault_tolerance__join_timeout_ms"],
            min_replica_size=self.least,
        )
        self.lighthouse = context.Process(target=serve, args=(options, port, theirs), daemon=True)
        self.lighthouse.start()
        theirs.close()
        self.address = mine.recv()

    def restart_lighthouse(self, *, seconds: float) -> None:
        """Kills it, and starts another at the same address later."""
        self.lighthouse.kill()
        self.lighthouse.join()
        time.sleep(seconds)
        self.start_lighthouse(port=int(self.address.rpartition(":")[2]))

    def start(self, group: int, *, faults=(), **changes) -> None:
        """Starts one replica group."""
        argv = options(self.corpus, self.folder, **{**self.changes, "fault_tolerance__replica_id": group, **changes})
        self.starts.append((time.time(), group))
        self.running[group] = Group(
            argv,
            group=group,
            ranks=self.ranks,
            faults=list(faults),
            folder=self.folder,
            pace=self.pace,
            env={"TORCHFT_LIGHTHOUSE": self.address, "RUST_LOG": "error", **self.env},
        )

    def start_all(self, *, faults=()) -> "Cluster":
        """Starts all replica groups, to be struck by faults, which are given in the order of their steps."""
        self.faults = list(faults)
        for group in range(self.groups):
            self.start(group, faults=[fault for fault in faults if not fault.returning])
        return self

    def faults_left(self, group: int) -> list:
        """Those that are still to come for a group that starts again; one of them may be meant for its return."""
        reached = max(self.step_of(group) for group in range(self.groups))
        later = [fault for fault in self.faults if fault.step > reached + 1 and not fault.returning]
        returning = [fault for fault in self.faults if fault.returning and fault.group == group]
        for fault in returning[:1]:
            self.faults.remove(fault)
        return [*later, *returning[:1]]

    def watch_over(self, *, timeout: float = 120, until=None) -> "Cluster":
        """Revives what dies, until all groups have finished or `until()` holds."""
        deadline = time.monotonic() + timeout
        dead: dict[int, float] = {}
        while self.running or dead:
            assert time.monotonic() < deadline, f"not finished in {timeout} s:\n{self.log}"
            if until is not None and until():
                return self
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
                    dead[group] = time.monotonic() + self.revive_seconds
            for group in [group for group, moment in dead.items() if time.monotonic() >= moment]:
                del dead[group]
                self.start(group, faults=self.faults_left(group))
            time.sleep(0.01)
        return self

    def kill(self, *groups: int) -> None:
        """SIGKILL to all ranks of these groups, which are then not revived."""
        for group in groups:
            self.running.pop(group).end()

    def close(self) -> None:
        """Ends what still runs."""
        self.kill(*self.running)
        self.lighthouse.kill()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def log_of(self, group: int, *, rank: int = 0) -> str:
        """What a rank of a group has printed, over all its starts."""
        return (self.folder / f"group{group}.rank{rank}.log").read_text()

    @property
    def log(self) -> str:
        """What all ranks have printed, but for the steps."""
        files = sorted(self.folder.glob("group*.log"))
        lines = [f"{file.stem}: {line}" for file in files for line in file.read_text().splitlines()]
        return "\n".join(line for line in lines if "  loss " not in line)

    def step_rows(self, group: int) -> list[dict]:
        """The rows of steps in a group's metrics.jsonl."""
        file = self.folder / "run" / f"replica-{group}" / "metrics.jsonl"
        rows = (
            [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        )
        return [row for row in rows if "loss" in row]

    def step_of(self, group: int) -> int:
        """The last step a group has logged."""
        return max((row["step"] for row in self.step_rows(group)), default=0)

    @property
    def losses(self) -> dict[int, float]:
        """By step; all groups must agree to the last bit."""
        found: dict[int, float] = {}
        for group in range(self.groups):
            for row in self.step_rows(group):
                assert found.setdefault(row["step"], row["loss"]) == row["loss"], f"groups differ: {row}"
        return found

    def digests(self, kind: str = "") -> dict[int, set[str]]:
        """Of parameters and optimizer state at the end, by rank; one each where all groups are the same."""
        found = defaultdict(set)
        for file in self.folder.glob(f"digest.{kind.replace('/', '_')}.*.*"):
            found[int(file.suffix[1:])].add(file.read_text())
        return dict(found)

    def stalls(self, *groups: int) -> list[Stall]:
        """The longest times between two steps that a process of these groups committed; of all groups, if none."""
        found = [stall for group in groups or range(self.groups) for stall in self._stalls(group)]
        return sorted(found, key=lambda stall: stall.seconds, reverse=True)

    def gaps(self, group: int) -> list[tuple[float, float]]:
        """From one step that a process of this group committed to its next; a process that dies leaves none open."""
        found, last = [], None
        for line in self.records().get(f"replica-{group}/rows.rank0.jsonl", []):
            if "started" in line:
                last = None
            elif line.get("committed"):
                found += [] if last is None else [(last, line["time"])]
                last = line["time"]
        return found

    def _stalls(self, group: int) -> list[Stall]:
        gaps = self.gaps(group)
        usual = median([end - start for start, end in gaps] or [0.0])
        deaths = [moment for moment, dead, _ in self.deaths if dead != group]
        return [
            Stall(
                seconds=end - start - usual,
                deaths=sum(start < moment < end for moment in deaths),
                group=group,
                start=start,
                end=end,
            )
            for start, end in gaps
        ]

    def timeline(self, stall: Stall) -> list[str]:
        """What happened in it: what the group itself noted; when others died, started, were ready and left a quorum."""
        events = [(moment, f"group {group} is found dead") for moment, group, _ in self.deaths]
        events += [(moment, f"group {group} is started") for moment, group in self.starts]
        for name, lines in self.records().items():
            own = name == f"replica-{stall.group}/rows.rank0.jsonl"
            for line in lines:
                if own or "started" in line or "left" in line:
                    what = {key: value for key, value in line.items() if key not in ("time", "rows")}
                    events.append((line["time"], f"{name.removesuffix('.jsonl')}: {what}"))
        inside = sorted(event for event in events if stall.start <= event[0] <= stall.end)
        return [f"{moment - stall.start:7.3f} s  {what}" for moment, what in inside]

    def wrong_rows(self) -> list[str]:
        """What is wrong with the groups' metrics.jsonl: each has the steps it committed that count, once, in order.

        What a group commits just before it dies it may not have logged any more.
        """
        wrong, records = [], self.records()
        counted = {step: attempt for step, (_, attempt) in counted_attempts(records).items()}
        for group in range(self.groups):
            logged = [row["step"] for row in self.step_rows(group)]
            own = {
                line["step"]
                for line in records.get(f"replica-{group}/rows.rank0.jsonl", [])
                if line.get("committed") and counted[line["step"]] == (line["step"], line["quorum"])
            }
            deaths = sum(dead == group for _, dead, _ in self.deaths)
            if logged != sorted(set(logged)) or set(logged) - own or len(own - set(logged)) > deaths:
                wrong.append(f"metrics of group {group}: {logged}, but committed were {sorted(own)}")
        return wrong

    def records(self) -> dict[str, list[dict]]:
        """What the ranks noted about rows and commits, by file, in order."""
        files = sorted((self.folder / "run").glob("replica-*/rows.rank*.jsonl"))
        return {
            f"{file.parent.name}/{file.name}": [json.loads(line) for line in file.read_text().splitlines()]
            for file in files
        }


def counted_attempts(records: dict[str, list[dict]]) -> dict[int, tuple[float, tuple[int, int]]]:
    """By step, when the attempt that counts was committed, and which it is (its step and its quorum).

    It is the last one: an earlier one is lost with the groups that committed it, or nobody would have tried again.
    """
    counted: dict[int, tuple[float, tuple[int, int]]] = {}
    for lines in records.values():
        for line in lines:
            if line.get("committed"):
                attempt = (line["time"], (line["step"], line["quorum"]))
                counted[line["step"]] = max(attempt, counted.get(line["step"], attempt))
    return counted


def committed_once(records: dict[str, list[dict]], *, steps: int, rows: int) -> list[str]:
    """What is wrong with the rows that were committed; nothing, if each was, once."""
    wrong = []
    fed: dict[tuple, set] = defaultdict(set)
    counted = counted_attempts(records)
    for name, lines in records.items():
        last = 0
        for line in lines:
            if "started" in line:
                last = 0
            elif "rows" in line:
                fed[line["step"], line["quorum"]].add(tuple(line["rows"]))
            elif line.get("committed"):
                if line["step"] <= last:
                    wrong.append(f"{name}: step {line['step']} is committed after step {last}")
                last = line["step"]
    for step in range(1, steps + 1):
        if step not in counted:
            wrong.append(f"step {step} was not committed")
            continue
        found = sorted(row for start, stop in fed[counted[step][1]] for row in range(start, stop))
        if found != list(range((step - 1) * rows, step * rows)):
            wrong.append(f"step {step}: rows {found}")
    return wrong
