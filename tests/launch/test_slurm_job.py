"""Decisions of launch/slurm_job.sh, with Slurm's commands replaced by small scripts; needs no cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "torchtitan_clone" / "launch" / "slurm_job.sh"
SRUN = 'echo "$@" >>{folder}/srun; echo "address $MASTER_ADDR:$MASTER_PORT"; exit ${{CODE:-0}}'
TWO_HOSTS = "NodeName=a1 NodeAddr={addresses[0]} NodeHostName=a1\nNodeName=a2 NodeAddr={addresses[1]} NodeHostName=a2"


class Node:
    """The first node of a job on two hosts."""

    def __init__(
        self, folder: Path, *, addresses=("10.1.2.3", "10.1.2.4"), own="10.9.9.9", state="RUNNING Reason=None"
    ):
        self.folder = folder
        (folder / "bin").mkdir()
        self.add_command("srun", SRUN.format(folder=folder))
        self.add_command("hostname", f"echo {own}")
        nodes = TWO_HOSTS.format(addresses=addresses)
        self.add_command(
            "scontrol",
            f"""case "$1 $2" in
                "show node") printf '%s\\n' '{nodes}' ;;
                "show job")
                    [ "$3" != 5 ] || echo "JobId=6 JobState=COMPLETING Reason=None Dependency="
                    echo "JobId=7 JobState={state} Dependency=" ;;
                *) echo "$@" >>{folder}/scontrol ;;
            esac""",
        )

    def add_command(self, name: str, script: str) -> None:
        """Adds a command to PATH."""
        file = self.folder / "bin" / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Runs the job; returns its exit code and log."""
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "a[1-2]", "SLURMD_NODENAME": "a1", "RUN_FOLDER": str(self.folder),
            "CHECKPOINTS": str(self.folder / "checkpoint"), "MAX_STARTS_WITHOUT_PROGRESS": "3", **variables,
        }  # fmt: skip
        (self.folder / "slurm").mkdir(exist_ok=True)
        command = ["bash", JOB, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout + done.stderr

    def calls(self, command: str) -> str:
        """Returns the arguments of all calls of a command."""
        file = self.folder / command
        return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("addresses", "own", "expected"),
    [
        (("10.1.2.3", "10.1.2.4"), "10.9.9.9", "10.1.2.3"),
        (("127.0.1.1", "10.1.2.4"), "127.0.1.1 10.9.9.9", "10.9.9.9"),
        (("no-such-name.invalid", "10.1.2.4"), "::1 10.9.9.9", "10.9.9.9"),
    ],
)
def test_rendezvous_address_is_reachable_from_other_nodes(tmp_path, addresses, own, expected):
    code, log = Node(tmp_path, addresses=addresses, own=own).start("--training.steps=5")
    assert code == 0, log
    assert f"address {expected}:20007" in log
    assert "complete" in log


@pytest.mark.skipif(not shutil.which("mawk"), reason="needs mawk, which can read a line at a time as gawk does")
def test_rendezvous_address_is_found_before_all_addresses_are_listed(tmp_path):
    node = Node(tmp_path)
    node.add_command("awk", f'exec {shutil.which("mawk")} -W interactive "$@"')
    node.add_command("hostname", "sleep 0.2; echo 10.9.9.9")
    code, log = node.start()
    assert (code, "address 10.1.2.3:" in log) == (0, True), log


def test_node_with_only_loopback_addresses_is_an_error(tmp_path):
    node = Node(tmp_path, addresses=("127.0.1.1", "10.1.2.4"), own="127.0.0.1")
    code, log = node.start()
    assert code == 1
    assert "a1 has only loopback addresses" in log
    assert "launch.environment.MASTER_ADDR" in log
    assert not node.calls("srun")
    code, log = node.start(MASTER_ADDR="10.0.0.5")
    assert (code, "address 10.0.0.5:" in log) == (0, True)


@pytest.mark.parametrize(
    ("code", "state", "requeued", "message"),
    [
        (0, "RUNNING Reason=None", False, "complete"),
        (2, "RUNNING Reason=None", False, "not requeued: the configuration is invalid"),
        (75, "RUNNING Reason=None", True, "requeued"),
        (1, "RUNNING Reason=None", True, "requeued"),
        (75, "COMPLETING Reason=TimeLimit", True, "requeued"),
        (75, "CANCELLED Reason=None", False, "not requeued: Slurm is terminating the job (CANCELLED None)"),
    ],
)
def test_requeue_by_exit_code_and_job_state(tmp_path, code, state, requeued, message):
    node = Node(tmp_path, state=state)
    assert node.start(CODE=str(code))[0] == (0 if requeued else code)
    assert node.calls("scontrol") == ("requeue 7\n" if requeued else "")
    assert message in node.start(CODE=str(code))[1]


TWO_NODES = """
shift 2
SLURM_NODEID=0 "$@" &
until [ -e {folder}/trains ]; do sleep 0.05; done
SLURM_NODEID=1 LOG_RANK=7 "$@"; codes=$?
kill -TERM $!
wait $!; codes="$codes $?"
echo "nodes exit with $codes"
exit ${{codes#* }}
"""
"""Node 1 has an invalid configuration; node 0 saves when srun ends it, and srun exits with the higher code."""


def test_an_invalid_configuration_of_one_node_is_not_requeued(tmp_path):
    node = Node(tmp_path)
    node.add_command("srun", TWO_NODES.format(folder=tmp_path))
    node.add_command(
        "python",
        f"""[ $NODE_RANK = 0 ] || exec {sys.executable} "$@"
        trap "exit 75" TERM
        touch {tmp_path}/trains
        while :; do sleep 0.05; done""",
    )
    variables = {"PYTHON": str(tmp_path / "bin" / "python"), "NO_SETUP": "1", "NGPU": "1", "MASTER_ADDR": "127.0.0.1"}
    code, log = node.start(**variables)
    assert "nodes exit with 2 75" in log
    assert (code, "not requeued: the configuration is invalid" in log) == (2, True), log
    assert not node.calls("scontrol")
    node.add_command("srun", "exit 75")
    assert node.start(**variables)[0] == 0  # in the same folder
    assert node.calls("scontrol") == "requeue 7\n"


def test_job_is_requeued_while_recent_starts_make_progress(tmp_path):
    node = Node(tmp_path)
    logs = [node.start(CODE="1")[1] for _ in range(2)]
    (tmp_path / "checkpoint" / "step-20").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-30.partial-x").mkdir()
    logs += [node.start(CODE="1")[1] for _ in range(4)]
    assert [" requeued" in log and "not requeued" not in log for log in logs] == [True] * 4 + [False] * 2
    assert "not requeued: 3 consecutive starts without a checkpoint after step 20" in logs[-1]


def test_array_task_is_a_replica_group(tmp_path):
    node = Node(tmp_path)
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert node.start("--fault_tolerance.enable", CODE="1", **task)[0] == 0
    assert node.calls("scontrol") == "requeue 5_3\n"
    assert node.calls("srun").endswith("--fault_tolerance.enable --fault_tolerance.replica_id=3\n")


def test_checkpoints_behind_a_link_are_progress(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint").symlink_to(tmp_path / "elsewhere")
    node = Node(tmp_path)
    node.add_command("srun", f"mkdir {tmp_path}/elsewhere/step-$(date +%s%N); exit 75")
    for _ in range(4):
        _, log = node.start("--training.steps=5")
        assert "not requeued" not in log, log
    assert node.calls("scontrol").count("requeue") == 4
