"""Attacks on the sockets of a run: those of torchtitan_clone/launch/rendezvous.py, of its ranks, of the lighthouse.

Real runs are started, and every listening socket of every process is looked up in /proc.
"""

import base64
import contextlib
import http.client
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.marks import needs_door
from tests.support.harness import run_ranks
from tests.support.runs import options, read_json_lines, rows, train
from tests.support.trainers import train_all
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.launch.torchrun import main
from torchtitan_clone.network import InterfaceError, find_interface

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHON": sys.executable, "NO_SETUP": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(REPOSITORY),
}  # fmt: skip
ENDLESS = 10**6
WAITING_WORKER = """
import os, signal

signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
open(f"started{os.environ['RANK']}", "w").close()
while True:
    signal.pause()
"""


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def processes_below(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Returns address and port of all TCP sockets on which a process or a descendant of it listens."""
    inodes = set()
    for process in processes_below(pid):
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                digits, port = local.split(":")
                words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                found.add((str(ip_address(b"".join(words))), int(port, 16)))
    return found


def beyond_loopback(addresses: set[tuple[str, int]]) -> set[tuple[str, int]]:
    return {(address, port) for address, port in addresses if not ip_address(address).is_loopback}


def own_addresses() -> list[str]:
    """Returns an address of this machine that is not a loopback address, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            return []
        return [probe.getsockname()[0]]


def wait_until(condition: Callable[[], object], *, processes: list[subprocess.Popen]) -> None:
    """Waits while these processes run; pytest's timeout ends a test that waits for ever."""
    while not condition():
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.05)


@contextlib.contextmanager
def started(*command: object, environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen]:
    """Starts a command with its output in a file; kills it and its descendants at the end."""
    with (folder / "output.log").open("ab") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, env=os.environ | ENVIRONMENT | environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        for pid in processes_below(process.pid)[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_all_sockets_of_two_ranks_on_one_node_are_on_loopback(corpus, tmp_path):
    changes = {"training__steps": ENDLESS, "data__num_workers": 1, "checkpoint__interval": 5}
    command = [REPOSITORY / "run_train.sh", f"--job.config_file={os.devnull}", *options(corpus, tmp_path, **changes)]
    with started(*command, environment={"NGPU": "2"}, folder=tmp_path) as run:
        wait_until(lambda: any(row.get("step", 0) >= 6 for row in rows(tmp_path)), processes=[run])
        found = listening_addresses(run.pid)
    assert len(found) >= 3  # the launcher's store and gloo of two ranks
    assert beyond_loopback(found) == set()


def test_sockets_of_two_nodes_are_on_the_interface_that_was_named(corpus, tmp_path):
    name = next((name for _, name in socket.if_nameindex() if own_addresses() == addresses_of(name)), None)
    if name is None:
        pytest.skip("this machine has no network interface besides loopback")
    (address,) = own_addresses()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    changes = {"training__steps": ENDLESS, "comm__interface": name}
    command = [REPOSITORY / "run_train.sh", f"--job.config_file={os.devnull}", *options(corpus, tmp_path, **changes)]
    common = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(started(*command, environment=common | {"NODE_RANK": str(node)}, folder=tmp_path))
            for node in range(2)
        ]
        wait_until(lambda: any(row.get("step", 0) >= 2 for row in rows(tmp_path)), processes=nodes)
        found = set().union(*(listening_addresses(node.pid) for node in nodes))
    assert {each for each, _ in found} == {address}
    assert (address, port) in found


def addresses_of(interface: str) -> list[str]:
    try:
        return [find_interface(interface).address]
    except InterfaceError:
        return []


def test_a_stranger_cannot_run_code_through_the_launchers_store(tmp_path):
    (tmp_path / "worker.py").write_text(WAITING_WORKER)
    command = [sys.executable, "-m", "torchtitan_clone.launch.torchrun", "--nproc-per-node=2", "--train-file=worker"]
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "TMPDIR": str(tmp_path)}
    with started(*command, environment=environment, folder=tmp_path) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("started*"))) == 2, processes=[launcher])
        ports = {port for _, port in listening_addresses(launcher.pid)}
        reached = [each for each in own_addresses() for port in ports if socket.socket().connect_ex((each, port)) == 0]
        # What every user of this machine can do.
        stores = [dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)) for port in ports]
        keys = [(store, key) for store in stores for key in store.list_keys()]
        for store, key in keys:
            store.set(key, base64.b64encode(pickle.dumps(Payload(tmp_path / "executed"))))
        time.sleep(4)  # torch's own rendezvous trusts what it has read for 3 s, and then reads again
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    assert keys
    assert not (tmp_path / "executed").exists()
    assert reached == []


@pytest.fixture(scope="module")
def replica_groups(corpus, tmp_path_factory):
    """Starts a lighthouse and two replica groups, as in the documentation, which train for ever.

    Returns their folder, the address of the lighthouse and their processes, the lighthouse first.
    """
    folder = tmp_path_factory.mktemp("groups")
    changes = {
        "training__steps": ENDLESS, "fault_tolerance__enable": True, "fault_tolerance__group_size": 2,
        "fault_tolerance__process_group_timeout_ms": 20000,
    }  # fmt: skip
    argv = [f"--job.config_file={os.devnull}", *options(corpus, folder, **changes)]
    with contextlib.ExitStack() as stack:

        def start(*command: object, **environment: str) -> subprocess.Popen:
            return stack.enter_context(started(*command, *argv, environment=environment, folder=folder))

        lighthouse = start(sys.executable, REPOSITORY / "scripts" / "lighthouse.py", "--port=0")
        log = folder / "output.log"
        wait_until(lambda: "TORCHFT_LIGHTHOUSE=" in log.read_text(), processes=[lighthouse])
        port = int(re.findall(r"TORCHFT_LIGHTHOUSE=http://.*:(\d+)", log.read_text())[0])
        address = f"http://127.0.0.1:{port}"
        groups = [
            start(REPOSITORY / "run_train.sh", f"--fault_tolerance.replica_id={group}", TORCHFT_LIGHTHOUSE=address)
            for group in range(2)
        ]
        processes = [lighthouse, *groups]
        wait_until(lambda: min(last_steps(folder)) >= 3 and "2 replica groups" in log.read_text(), processes=processes)
        yield folder, port, processes


def last_steps(folder: Path) -> list[int]:
    """Returns the last step of each of two groups, 0 before the first."""
    files = [folder / "run" / f"replica-{group}" / "metrics.jsonl" for group in range(2)]
    return [max((row["step"] for row in read_json_lines(file) if "loss" in row), default=0) for file in files]


@needs_door("torchft")
def test_all_sockets_of_replica_groups_on_one_machine_are_on_loopback(replica_groups):
    _, _, processes = replica_groups
    found = [listening_addresses(process.pid) for process in processes]
    assert all(found)
    assert beyond_loopback(set().union(*found)) == set()


@needs_door("torchft")
def test_the_lighthouse_ends_no_group_for_whoever_asks(replica_groups):
    folder, port, processes = replica_groups
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as browser:
        browser.request("GET", "/status")
        names = set(re.findall(r"/replica/([^/\"]+)/kill", browser.getresponse().read().decode()))
    assert len(names) == 2
    for name in names:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as browser:
            browser.request("POST", f"/replica/{name}/kill")
            with contextlib.suppress(TimeoutError, ConnectionError):
                assert browser.getresponse().status != 200
    before = last_steps(folder)
    wait_until(lambda: min(last_steps(folder)) > max(before) + 20, processes=processes)
    assert (folder / "output.log").read_text().count("2 replica groups, this one is") == 2  # none left


def test_an_interface_that_does_not_exist_is_a_configuration_error(corpus, tmp_path, capfd):
    argv = options(corpus, tmp_path, comm__interface="nowhere0")
    problem = 'error: comm.interface = "nowhere0": this machine has no such network interface; available: lo'
    code, output = train(argv, log_folder=tmp_path)
    assert (code, output.startswith(problem)) == (2, True)
    assert not (tmp_path / "run").exists()
    nodes = ["--nproc-per-node=1", "--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1"]
    assert main([*nodes, *argv]) == 2
    assert capfd.readouterr().err.startswith(problem)


def train_without_unpickling(runs: list[list[str]]) -> None:
    """Trains as one rank in which torch cannot unpickle what other ranks send."""

    def refuse(*_: object) -> None:
        raise AssertionError("unpickled what another rank sent")

    vars(dist.distributed_c10d)["_tensor_to_object"] = refuse
    train_all(runs)


def test_no_collective_of_a_run_unpickles_what_other_ranks_send(corpus, tmp_path):
    """Neither ours nor those of torch: meshes, pipeline stages, sharding, saving, resuming, stragglers."""
    meshes = [{"parallelism__pipeline_parallel_degree": 2}, {"parallelism__tensor_parallel_degree": 2}, {}]
    runs = [
        options(corpus, tmp_path, comm__straggler_freq=1, checkpoint__interval=1, training__steps=2 * number, **mesh)
        for number, mesh in enumerate(meshes, start=1)
    ]
    run_ranks(train_without_unpickling, 2, runs)
    assert committed_steps(tmp_path / "run" / "checkpoint")[-1] == 6
