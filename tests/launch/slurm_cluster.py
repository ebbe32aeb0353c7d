"""A real Slurm on this machine, in a folder of its own: controller, node daemons and authentication."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Nothing that needs root's own cgroups, a database or a mail server.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=20
SchedulerParameters=sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str:
    """Why there can be no Slurm here, "" if there can; root's machines get it installed."""
    if all(map(shutil.which, COMMANDS)):
        return ""
    if os.geteuid() or not shutil.which("apt-get") or os.environ.get("NO_SETUP"):
        return f"Slurm is not installed; as root: {INSTALL}"
    for command in (["apt-get", "update", "-q"], INSTALL.split()):
        limits = ["-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=0"]
        try:
            done = subprocess.run([*command, *limits], capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            return f"Slurm cannot be installed here: {' '.join(command)} took more than 240 s"
        if done.returncode:
            return f"Slurm cannot be installed here: {done.stderr.strip().splitlines()[-1:]}"
    return "" if all(map(shutil.which, COMMANDS)) else "Slurm was installed and is not there"


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody listens at."""
    for first in range(26000, 30000, count):
        try:
            sockets = [socket.create_server(("", port)) for port in range(first, first + count)]
        except OSError:
            continue
        for each in sockets:
            each.close()
        return first
    raise OSError("no free ports")


class Cluster:
    """Nodes n1, n2, ... on this host; partition `high` takes nodes from jobs in `low`, the default."""

    def __init__(self, folder: Path, *, nodes: int, cpus: int):
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        for name in ("state", "munge", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir(parents=True, mode=0o700 if name == "munge" else 0o755)
        port = free_ports(nodes + 1)
        facts = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
        ports = {"port": port, "first": port + 1, "last": port + nodes}
        text = CONFIGURATION.format(folder=folder, nodes=nodes, cpus=cpus, **facts, **ports)
        (folder / "slurm.conf").write_text(text)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        names = {"key-file": "munge/key", "seed-file": "munge/seed", "log-file": "munge/log", "pid-file": "munge.pid"}
        places = [f"--{option}={self.folder / name}" for option, name in names.items()]
        self.run("munged", "--force", f"--socket={self.folder / 'munge.socket'}", *places)
        self.run("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%T %D") == f"idle {len(self.nodes)}", 30)

    def start_node(self, node: str) -> None:
        """Starts the daemon of a node."""
        self.run("slurmd", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, node: str) -> None:
        """As if the machine had lost power: daemon and processes are gone."""
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        self.kill({f"SLURMD_NODENAME={node}"})

    def run(self, *command: str, environment: dict[str, str] | None = None) -> str:
        """The output of one of Slurm's commands, which must succeed."""
        env = self.environment | (environment or {})
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        fields = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job, "-o").split())
        return fields["JobState"]

    def wait_for_state(self, job: str, state: str, timeout: float) -> None:
        """Waits until the job is in that state; a requeued job is not left to wait for the two minutes of Slurm."""

        def reached() -> bool:
            now = self.state(job)
            if now == "PENDING" != state:
                time.sleep(3)  # at once, the job's old credential would end the new start
                with contextlib.suppress(AssertionError):  # it may have started by now
                    self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            return now == state

        self.wait_for(reached, timeout)

    def wait_for(self, condition, timeout: float) -> None:
        """Polls until the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.describe()
            time.sleep(0.2)

    def describe(self) -> str:
        """What is known when something is late."""
        logs = "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))
        return f"{self.run('squeue', '-o', '%i %T %r')}\n{logs}"

    def stop(self) -> None:
        """Ends all daemons and jobs at once: jobs would answer a cancellation with a save, which nobody awaits."""
        while self.kill(set()):
            time.sleep(0.2)

    def kill(self, marks: set[str], *, command: str = "") -> int:
        """Kills all processes of this cluster with that command and these words in their environment; their number."""
        count = 0
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = set((process / "environ").read_text().split("\0"))
                if marks | {f"SLURM_CONF={self.folder / 'slurm.conf'}"} <= words and (
                    command in (process / "cmdline").read_text()
                ):
                    os.kill(int(process.name), signal.SIGKILL)
                    count += 1
        return count
