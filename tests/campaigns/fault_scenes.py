"""Small runs that train through faults, are started again when a fault may end them, and are checked at the end.

A scene notes in `wrong` whatever must not happen: a process that ends for a fault that it must survive, a resume from
an older checkpoint than was committed, a lost or repeated row, other losses or final tensors than an undisturbed run's.
"""

import multiprocessing.process
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from tests.campaigns.fault_tools import Disk, Network, Proxy, descendants, send, wait_until_gone
from tests.support.attempts import Records
from tests.support.checkpoint_states import read_tensors
from tests.support.cluster import Cluster, Group, committed_once
from tests.support.faults import Fault, FaultyReplicaGroup, run_entry_point
from tests.support.harness import start_ranks
from tests.support.runs import losses, options, redirect_output, rows
from torchtitan_clone.checkpoint.folder import committed_steps, finished_step, newest_complete_step, step_folder

if TYPE_CHECKING:
    from torchtitan_clone.replicas.protocol import ReplicaGroup

ROWS, ROUND = 12, 5
MODES = ("disabled", "async", "async_with_pinned_mem")
STALLED_SECONDS = 400
"""A run that makes no progress for this long, although nothing holds it up, hangs."""
LEFT_BEHIND_SECONDS = 90
"""Loader workers end within 60 s of a trainer that was killed."""
MARKS = {"writer": "checkpoint/writer.py", "encoder": "data/encoder.py", "worker": "spawn_main"}
"""What is found in the command lines of the processes that a rank starts."""
SMALL: dict[str, object] = {
    "training__global_batch_size": ROWS,
    "training__local_batch_size": 6,
    "training__seq_len": 32,
    "model__args__dim": 32,
    "model__args__n_layers": 1,
    "checkpoint__interval": 4,
    "checkpoint__keep_latest_k": 3,
    "comm__straggler_freq": 0,
}
OF_GROUPS: dict[str, object] = {
    "training__local_batch_size": 4,
    "checkpoint__interval": 10,
    "fault_tolerance__heartbeat_timeout_ms": 1500,
    "fault_tolerance__process_group_timeout_ms": 3000,
    "fault_tolerance__join_timeout_ms": 5000,
    "fault_tolerance__min_replica_size": 1,
}


class NotStruckError(Exception):
    """The fault found no victim, such as a writer process in a run that has none."""


class HangError(Exception):
    """The run makes no progress."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """What all scenes share."""

    corpus: Path
    streamed: Path
    """A folder in the layout of a Hugging Face dataset."""
    references: Path
    """Folders of the undisturbed runs, by the name of their data."""
    steps: int
    """Of every run."""
    pace: float
    """Seconds that every step sleeps: faults strike more often in the same processor time."""

    def options_of(self, name: str) -> dict[str, object]:
        """Returns the options of runs on "local" or "streamed" data."""
        small = {**SMALL, "training__steps": self.steps}
        if name == "local":
            return small
        return small | {"training__dataset": self.streamed, "training__dataset_path": None, "data__num_workers": 1}


class Scene(Protocol):
    """A run that faults strike."""

    name: str
    folder: Path
    steps: int
    source: random.Random
    may_end: bool
    """Whether the fault that strikes now may end the processes it strikes."""
    wrong: list[str]

    def start(self) -> None:
        """Starts the run."""
        ...

    def watch(self, steps: int) -> None:
        """Waits for this many further steps, and starts again what ends; HangError if they do not come."""
        ...

    def step(self) -> int:
        """Returns the last step that is logged."""
        ...

    def finish(self) -> None:
        """Waits for the end of the run and checks what it left."""
        ...

    def close(self) -> None:
        """Ends all processes."""
        ...


def train_one_rank(argv: list[str], logs: list[Path], pace: float) -> None:
    """Runs the entry point as one rank, with steps that sleep for `pace` seconds; exits with its code."""
    redirect_output(logs[int(os.environ["RANK"])])
    vars(multiprocessing.process.current_process())["_config"]["daemon"] = False  # a rank may start loader workers

    def slow_down(group: "ReplicaGroup") -> "ReplicaGroup":
        return cast("ReplicaGroup", FaultyReplicaGroup(group, faults=[], pace=pace, at_close=lambda: None))

    code = run_entry_point(argv, wrap_replica_group=slow_down)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class OneNode:
    """Two ranks with sharded state and checkpoints in one of the three modes."""

    has_launcher = False

    def __init__(self, material: Material, folder: Path, *, name: str, source: random.Random) -> None:
        changes = material.options_of("streamed" if name == "streamed data" else "local")
        self.name = name
        self.folder = folder
        self.steps = material.steps
        self.source = source
        self.may_end = False
        self.wrong: list[str] = []
        self.disk = Disk(folder / "disk") if name == "small disk" else None
        self.dump_folder = folder if self.disk is None else self.disk.folder
        self.committed = 0
        self.before: int | None = None
        """What was committed before the present start, until that has been compared with where it resumed."""
        self.seen: set[int] = set()
        self._material = material
        self._changes = {**changes, "checkpoint__async_mode": source.choice(MODES)}
        self._starts = 0
        self._log = folder
        self._run: Group | subprocess.Popen[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.dump_folder / "run" / "checkpoint"

    def start(self, **changes: object) -> None:
        """Starts the run; `changes` are kept for later starts."""
        self._changes.update(changes)
        self.note_commits()
        self.before = self.committed
        self._starts += 1
        self._log = self.folder / f"start-{self._starts}"
        self._log.mkdir(parents=True)
        self._run = self._launch(options(self._material.corpus, self.dump_folder, **self._changes))

    def _launch(self, argv: list[str]) -> Group | subprocess.Popen[bytes]:
        logs = [self._log / f"rank{rank}.log" for rank in range(2)]
        return Group(start_ranks(train_one_rank, 2, argv, logs, self._material.pace))

    def log_text(self) -> str:
        """Returns what rank 0 of the present start has printed."""
        file = self._log / "rank0.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def pids(self, what: str = "rank") -> list[int]:
        """Returns the processes that are ranks, or writers, encoders or workers of them. NotStruckError if none is."""
        assert isinstance(self._run, Group)
        ranks = [rank.process.pid or 0 for rank in self._run.ranks if rank.process.exitcode is None]
        return self._choose(what, ranks=ranks)

    def _choose(self, what: str, *, ranks: list[int]) -> list[int]:
        found = ranks
        if what in MARKS:
            found = [pid for pid, text in descendants(ranks).items() if MARKS[what] in text]
            self.seen.update(found)
        if not found:
            raise NotStruckError(f"there is no {what}")
        return found

    def codes(self) -> list[int | None]:
        """Returns the exit codes of all processes that were started, None for those that run."""
        assert isinstance(self._run, Group)
        return self._run.codes

    def end(self) -> None:
        """Kills all ranks and waits until they have ended."""
        assert isinstance(self._run, Group)
        self._run.end()

    def step(self) -> int:
        return max(losses(self.dump_folder), default=0)

    def note_commits(self) -> None:
        """Records the newest committed step, which no later start may miss; damaged ones are set aside by then."""
        if "  loss " not in self.log_text():
            return
        self.committed = max(self.committed, newest_complete_step(self.checkpoints) or 0)

    def watch(self, steps: int) -> None:
        base, deadline = self.log_text().count("  loss "), time.monotonic() + STALLED_SECONDS
        while not self.is_complete():
            if any(code is not None for code in self.codes()):
                if not self._handle_end():
                    return
                base = 0
            self.note_commits()
            if self.log_text().count("  loss ") >= base + steps:
                self._check_resume()
                return
            if time.monotonic() > deadline:
                raise HangError(f"no {steps} steps in {STALLED_SECONDS} s: {self.log_text()[-600:]}")
            time.sleep(0.1)

    def is_complete(self) -> bool:
        """Returns whether all steps are done and all processes ended well."""
        return finished_step(self.checkpoints) == self.steps and set(self.codes()) == {0}

    def _handle_end(self) -> bool:
        """Waits for all ranks to end, as an agent does, checks what they left, and starts again unless complete."""
        deadline = time.monotonic() + 20
        while None in self.codes() and set(self.codes()) <= {0, None} and time.monotonic() < deadline:
            time.sleep(0.02)
        codes = self.codes()
        self.end()
        if self.is_complete():
            return False
        trained = "  loss " in self.log_text()
        if set(codes) == {0} and trained and newest_complete_step(self.checkpoints) != self.step():
            self.wrong.append(f"stopped at step {self.step()}, saved {newest_complete_step(self.checkpoints)}")
        if not self.may_end:
            self.wrong.append(f"ended with {codes}: {self.log_text()[-600:]}")
        self.start()
        return True

    def _check_resume(self) -> None:
        if self.before is None:
            return
        found = re.findall(r"resumed after step (\d+)", self.log_text())
        first = re.search(r" step (\d+)/\d+  loss ", self.log_text())
        resumed = int(found[-1]) if found else 0
        if first is None or int(first[1]) != resumed + 1:
            self.wrong.append(f"resumed after step {resumed}, but trained {first and first[1]} first")
        if resumed < self.before:
            self.wrong.append(f"resumed after step {resumed} although {self.before} was committed")
        self.before = None

    def finish(self) -> None:
        self.may_end = False
        while not self.is_complete():
            self.watch(10)
        reference = self._material.references / ("streamed" if self.name == "streamed data" else "local")
        self.wrong += check_against(reference, self.dump_folder, lenient=self.disk is not None)
        if left := wait_until_gone(sorted(self.seen), timeout=LEFT_BEHIND_SECONDS):
            self.wrong.append(f"left behind: {left}")

    def close(self) -> None:
        if self._run is not None:
            self.end()
        if self.disk is not None:
            self.disk.close()


class Launched(OneNode):
    """The same with the launcher of run_train.sh."""

    has_launcher = True

    def _launch(self, argv: list[str]) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "torchtitan_clone.launch.torchrun", "--nproc-per-node=2"]
        words.append(f"--log-folder={self._log / 'ranks'}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (self._log / "rank0.log").open("wb") as log:
            return subprocess.Popen([*words, *argv], stdout=log, stderr=log, env=environment, start_new_session=True)

    def pids(self, what: str = "rank") -> list[int]:
        assert isinstance(self._run, subprocess.Popen)
        if what == "launcher":
            return [self._run.pid]
        ranks = [pid for pid, text in descendants([self._run.pid]).items() if "-m torchtitan_clone.train" in text]
        self.seen.update(ranks)
        return self._choose(what, ranks=ranks)

    def codes(self) -> list[int | None]:
        assert isinstance(self._run, subprocess.Popen)
        return [self._run.poll()]

    def end(self) -> None:
        assert isinstance(self._run, subprocess.Popen)
        ranks = list(descendants([self._run.pid]))
        self._run.kill()
        self._run.wait()
        send(signal.SIGCONT, *ranks)  # a launcher that was stopped has not told them to end
        if left := wait_until_gone(ranks, timeout=LEFT_BEHIND_SECONDS):
            self.wrong.append(f"outlived the launcher: {left}")


class CampaignCluster(Cluster):
    """Replica groups that reach the lighthouse through a proxy each; their records carry the times of this process."""

    def __init__(
        self, corpus: Path, folder: Path, *, groups: int, network: Network | None, pace: float, changes: dict[str, Any]
    ) -> None:
        super().__init__(corpus, folder, groups=groups, pace=pace, **changes)  # at once: watch_over forgets who waits
        self.proxies = [Proxy(int(self.address.rpartition(":")[2])) for _ in range(groups)]
        self._network = network
        self._times: dict[str, list[float]] = defaultdict(list)

    def start(self, group: int, *, faults: Iterable[Fault] = (), **changes: object) -> None:
        self.env = {"TORCHFT_LIGHTHOUSE": self.proxies[group].address}
        super().start(group, faults=faults, **changes)
        if self._network is not None:
            self._network.place(self.pids(group), group=group)

    def pids(self, group: int) -> list[int]:
        """Returns the process ids of a group's ranks; NotStruckError if it does not run."""
        if group not in self.running:
            raise NotStruckError(f"group {group} does not run")
        return [rank.process.pid or 0 for rank in self.running[group].ranks]

    def observe(self) -> None:
        """Notes when lines of the records appear: the clocks of the groups may jump."""
        for file in (self.folder / "run").glob("replica-*/rows.rank*.jsonl"):
            times = self._times[f"{file.parent.name}/{file.name}"]
            count = file.read_bytes().count(b"\n")
            times += [time.time()] * (count - len(times))

    def records(self) -> Records:
        self.observe()
        return {
            name: [{**line, "time": moment} for line, moment in zip(lines, self._times[name], strict=False)]
            for name, lines in super().records().items()
        }


class Groups:
    """Replica groups with a lighthouse, synchronous or with LocalSGD."""

    def __init__(
        self, material: Material, folder: Path, *, name: str, source: random.Random, network: Network | None
    ) -> None:
        self.name = name
        self.folder = folder
        self.steps = material.steps
        self.source = source
        self.may_end = False
        self.wrong: list[str] = []
        self.struck: set[int] = set()
        """Groups that the present fault strikes."""
        self.network = network
        self._material = material
        self._deaths = 0
        self._may_die: dict[int, int] = {}
        """Groups that a fault may have ended, until they log another step than this one."""
        self._is_semi_sync = name == "semi-synchronous"
        method = {"fault_tolerance__semi_sync_method": "local_sgd", "fault_tolerance__sync_steps": ROUND}
        changes = {**material.options_of("local"), **OF_GROUPS, **(method if self._is_semi_sync else {})}
        self.cluster = CampaignCluster(
            material.corpus, folder, groups=3, network=network, pace=material.pace, changes=changes
        )

    def start(self) -> None:
        self.cluster.start_all()

    def step(self) -> int:
        return max(map(self.cluster.step_of, range(3)))

    def watch(self, steps: int) -> None:
        base = self.step()
        self._watch_until(lambda: self.step() >= min(base + steps, self.steps))

    def _watch_until(self, holds: Callable[[], bool]) -> None:
        moment = 0.0

        def is_over() -> bool:
            nonlocal moment
            if time.monotonic() < moment:
                return False
            self.cluster.observe()
            moment = time.monotonic() + 0.1  # reading what all groups have logged takes milliseconds
            return holds() or self._left() != []

        while True:
            try:
                self.cluster.watch_over(timeout=STALLED_SECONDS, until=is_over)
            except AssertionError as error:
                raise HangError(str(error)[-3000:]) from None
            self._judge_deaths()
            if not (left := self._left()):
                return
            for group in left:  # a signal has asked it to stop
                del self.cluster.finished[group]
                self.cluster.start(group)

    def _left(self) -> list[int]:
        """Returns the groups that ended well although the run is not complete."""
        is_complete = finished_step(self.cluster.folder / "run" / "checkpoint") == self.steps
        return [] if is_complete else list(self.cluster.finished)

    def _judge_deaths(self) -> None:
        self._may_die = {group: step for group, step in self._may_die.items() if self.cluster.step_of(group) == step}
        if self.may_end:  # a group that was stopped may end itself when it continues, after others have trained
            self._may_die |= {group: self.cluster.step_of(group) for group in self.struck}
        for _, group, codes in self.cluster.deaths[self._deaths :]:
            if group not in self._may_die:
                tail = self.cluster.log_of(group)[-800:]
                self.wrong.append(f"group {group}, which was not to end, ended with {codes}: {tail}")
        self._deaths = len(self.cluster.deaths)

    def finish(self) -> None:
        self.may_end = False
        self._watch_until(lambda: not self.cluster.running)
        unit = ROUND if self._is_semi_sync else 1
        self.wrong += committed_once(self.cluster.records(), steps=self.steps // unit, rows=ROWS * unit)
        self.wrong += self.cluster.wrong_rows() if unit == 1 else []
        prefix = "model/" if self._is_semi_sync else ""
        ended = [group for group in range(3) if self.cluster.step_of(group) == self.steps]
        found = self.cluster.digests(prefix, groups=ended)  # others came back when the run was complete
        self.wrong += [f"rank {rank}: groups ended differently" for rank in found if len(found[rank]) > 1]
        if unit == 1:
            self.wrong += self._wrong_losses()

    def _wrong_losses(self) -> list[str]:
        try:
            found = self.cluster.losses
        except AssertionError as error:
            return [str(error)]
        expected = losses(self._material.references / "local")
        return [
            f"step {step}: loss {loss} instead of {expected[step]}"
            for step, loss in found.items()
            if abs(loss - expected[step]) > 1e-3 * expected[step]
        ]

    def close(self) -> None:
        self.cluster.__exit__()
        for proxy in self.cluster.proxies:
            proxy.close()
        if self.network is not None:
            self.network.close()


def check_against(reference: Path, folder: Path, *, lenient: bool) -> list[str]:
    """Returns how a finished run differs from an undisturbed one; `lenient` permits missing rows of metrics."""
    wrong = []
    expected, found = losses(reference), losses(folder)
    differing = [step for step in found if found[step] != expected[step]]
    wrong += [f"step {step}: loss {found[step]}, not {expected[step]}" for step in differing]
    steps = [row["step"] for row in rows(folder) if "loss" in row]
    if steps != sorted(set(steps)) or (not lenient and steps != list(expected)):
        wrong.append(f"metrics hold the steps {steps}")
    here, there = (each / "run" / "checkpoint" for each in (folder, reference))
    last = max(expected)
    if committed_steps(here)[-1] != last:
        return [*wrong, f"the newest checkpoint is that of step {committed_steps(here)[-1]}"]
    own, others = (read_tensors(step_folder(each, last)) for each in (here, there))
    if own.keys() != others.keys():
        return [*wrong, f"tensors {own.keys() ^ others.keys()}"]
    differs = [name for name in own if not torch.equal(own[name], others[name])]
    return wrong + ([f"tensors of step {last} differ: {differs[:5]}"] if differs else [])
