"""A real Slurm cluster on this machine, configured in a temporary folder: controller, node daemons, authentication."""

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
"""Command that installs Slurm on Debian and Ubuntu; the tests never run it."""
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"
"""Debian installs the daemons into a folder that is not on an ordinary user's PATH."""

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
# Avoid features that need root's cgroups, a database or a mail server.
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


def missing_commands() -> list[str]:
    """Returns the commands of Slurm that are not installed."""
    return [command for command in COMMANDS if not shutil.which(command, path=PATH)]


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports."""
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
    """Nodes n1, n2, ... on this host; partition `high` preempts jobs in `low`, the default."""

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
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
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
        """Simulates a power loss: kills the daemon and all processes of the node."""
        os.kill(int((self.folder / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        self.kill({f"SLURMD_NODENAME={node}"})

    def run(self, *command: str, environment: dict[str, str] | None = None) -> str:
        """Runs a Slurm command, which must succeed; returns its output."""
        env = self.environment | (environment or {})
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Returns the job state: PENDING, RUNNING, COMPLETED, ..."""
        fields = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job, "-o").split())
        return fields["JobState"]

    def wait_for_state(self, job: str, state: str, timeout: float) -> None:
        """Waits for a job state; skips Slurm's two-minute delay of requeued jobs."""

        def reached() -> bool:
            now = self.state(job)
            if now == "PENDING" != state:
                time.sleep(3)  # right away, the job's old credential would end the new start
                with contextlib.suppress(AssertionError):  # the job may have started
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
        """Describes the queue and the logs for a failed wait."""
        logs = "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))
        return f"{self.run('squeue', '-o', '%i %T %r')}\n{logs}"

    def stop(self) -> None:
        """Kills all daemons and jobs; a cancelled job would first save."""
        while self.kill(set()):
            time.sleep(0.2)

    def kill(self, marks: set[str], *, command: str = "") -> int:
        """Kills this cluster's processes with the given command and environment entries; returns their number."""
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
