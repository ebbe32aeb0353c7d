"""Starts the training processes of this node, with torchrun's agent: one per device.

    python -m torchtitan_clone.launch.torchrun --nproc-per-node=2 --job.config_file=FILE --training.steps=20

What differs from torchrun:
- SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 reach the workers, once, and nothing is killed: the workers finish their step,
  save and exit, and so does the launcher. SIGQUIT (Ctrl-\\) ends everything at once.
- Workers start with these signals held back: one that comes while they start waits until they can answer it.
- The exit codes of a worker that has reported an error in its configuration (2) or was stopped with steps left (75) are
  passed on in silence. Any other failure is one short block, and an exit code that is not 0.
- Workers die with the launcher, even if it is killed by SIGKILL.
- Ranks that are not shown write to files, which are deleted after a success unless --log-folder says where to keep
  them; those shown own the terminal.
"""

import argparse
import contextlib
import ctypes
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from torchtitan_clone.config.signals import STOP_SIGNALS
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE

if TYPE_CHECKING:  # importing torch takes seconds, which a worker's way through this file must not cost
    from torch.distributed.elastic.agent.server import SimpleElasticAgent
    from torch.distributed.elastic.agent.server.api import RunResult

CONFIG_ERROR = 2
"""Exit code of a worker that has reported an error in its configuration."""
PR_SET_PDEATHSIG = 1
SIOCGIFADDR = 0x8915
LAST_LINES = 20
"""Lines shown of the log of a failed rank that the console does not show."""
WORKER = "--worker"


def main(argv: list[str]) -> int:
    """Launch, or be one of the processes launched; the exit code."""
    if argv[:1] == [WORKER]:
        _become_worker(int(argv[1]), module=argv[2], arguments=argv[3:])
    try:
        options, arguments = _parse(argv)
    except argparse.ArgumentError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return CONFIG_ERROR
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # before other threads start; the workers inherit it
    agents: list[SimpleElasticAgent] = []
    threading.Thread(target=_forward_signals, args=(agents,), daemon=True).start()
    logging.disable()  # what torchrun's agent has to say is said here, once
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.nproc_per_node)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    if options.nnodes > 1:
        # Else gloo takes the address that the host's name has, which on many machines is a loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_towards(options.master_addr))
        _say(f"node {options.node_rank} of {options.nnodes} meets the others at {_rendezvous(options)}")
    log_folder = options.log_folder or Path(tempfile.mkdtemp(prefix="torchtitan_clone_"))
    code = _launch(options, arguments, log_folder=log_folder, agents=agents)
    if code in (0, CONFIG_ERROR, REQUEUE_EXIT_CODE) and not options.log_folder:
        shutil.rmtree(log_folder)
    return code


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and what is left for the training; argparse.ArgumentError names what a user of run_train.sh set."""
    parser = argparse.ArgumentParser(
        prog="torchtitan_clone.launch.torchrun", allow_abbrev=False, add_help=False, exit_on_error=False
    )
    count, port = _number("NGPU", low=1), _number("MASTER_PORT", low=1, high=65535)
    parser.add_argument("--nproc-per-node", type=count, required=True, help="processes on this node")
    parser.add_argument("--nnodes", type=_number("NNODES", low=1), default=1, help="nodes; each starts this command")
    rank = _number("NODE_RANK", low=0)
    parser.add_argument("--node-rank", type=rank, default=0, help="which of the nodes this is; 0 hosts the rendezvous")
    parser.add_argument("--master-addr", default="127.0.0.1", help="node 0's address")
    parser.add_argument("--master-port", type=port, default=29500, help="a port free on node 0; unused with one node")
    parser.add_argument("--log-rank", default="0", help="local ranks shown on the console, for example 0,1")
    parser.add_argument("--log-folder", type=Path, help="where the output of the other ranks goes, and stays")
    parser.add_argument("--module", default="torchtitan_clone.train", help="what each process runs")
    options, arguments = parser.parse_known_args(argv)
    for problem in _problems(options):
        raise argparse.ArgumentError(None, problem)
    return options, arguments


def _number(name: str, *, low: int, high: int | None = None) -> Callable[[str], int]:
    """What reads a number that run_train.sh takes from that environment variable."""

    def parse(text: str) -> int:
        if re.fullmatch(r"-?\d+", text) and low <= int(text) <= (high or int(text)):
            return int(text)
        bounds = f"from {low} to {high}" if high else f"of at least {low}"
        raise argparse.ArgumentTypeError(f"{name} = {text}: must be a whole number {bounds}")

    return parse


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """What is wrong with these values together, or on this machine."""
    if options.node_rank >= options.nnodes:
        yield f"NODE_RANK = {options.node_rank}: at most {options.nnodes - 1} with NNODES {options.nnodes}"
    ranks = [str(rank) for rank in range(options.nproc_per_node)]
    if unknown := set(options.log_rank.split(",")) - set(ranks):
        yield f"LOG_RANK = {options.log_rank}: no local rank {', '.join(sorted(unknown))}; known: {', '.join(ranks)}"
    try:
        socket.getaddrinfo(options.master_addr, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:  # others may pass
            yield f"MASTER_ADDR = {options.master_addr}: there is no such host; set it to the address of node 0"
    try:
        if options.log_folder:
            options.log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"LOG_FOLDER = {options.log_folder}: cannot be made: {error.strerror}"


def _interface_towards(host: str) -> str:
    """The network interface from which this machine reaches that one; "" where none is found: gloo chooses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of a datagram socket: looks up the route, sends nothing
        except OSError:
            return ""
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return ""


def _rendezvous(options: argparse.Namespace) -> str:
    """Where the nodes meet, with a word about what would keep them from it."""
    place = f"{options.master_addr}:{options.master_port}"
    with contextlib.suppress(OSError):
        if ip_address(socket.gethostbyname(options.master_addr)).is_loopback:
            place += ", which is this machine only: with several, MASTER_ADDR must be an address that all reach"
    return place


def _become_worker(launcher_pid: int, *, module: str, arguments: list[str]) -> NoReturn:
    """Tie this process' life to the launcher's, then be `python -m module`: the tie outlasts exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died before the tie was made
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *arguments])


def _launch(
    options: argparse.Namespace, arguments: list[str], *, log_folder: Path, agents: "list[SimpleElasticAgent]"
) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    agent = _build_agent(options, arguments, log_folder=log_folder)
    agents.append(agent)
    try:
        result = cast("RunResult", agent.run())
    except SignalException as stop:
        _say(f"stopped at once by {stop.sigval.name}")
        return 128 + stop.sigval
    except (DistError, RendezvousError) as error:
        reason = str(error).splitlines()[0]
        _say(f"the {options.nnodes} nodes did not meet at {options.master_addr}:{options.master_port}: {reason}")
        return 1
    return _report(result, shown=_shown_ranks(options), log_folder=log_folder) if result.is_failed() else 0


def _build_agent(options: argparse.Namespace, arguments: list[str], *, log_folder: Path) -> "SimpleElasticAgent":
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    one_node = options.nnodes == 1
    rendezvous = RendezvousParameters(
        backend="c10d" if one_node else "static",
        endpoint="127.0.0.1:0" if one_node else f"{options.master_addr}:{options.master_port}",
        run_id=uuid.uuid4().hex if one_node else "torchtitan_clone",
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        local_addr="127.0.0.1" if one_node else None,
        rank=options.node_rank,
        timeout=900,
    )
    shown = _shown_ranks(options)
    spec = WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=sys.executable,
        args=("-m", "torchtitan_clone.launch.torchrun", WORKER, str(os.getpid()), options.module, *arguments),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=None if one_node else options.master_addr,
        master_port=None if one_node else options.master_port,
        local_addr=rendezvous.local_addr,
    )
    to_files = {rank: Std.NONE if rank in shown else Std.ALL for rank in range(options.nproc_per_node)}
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=to_files))


def _forward_signals(agents: "list[SimpleElasticAgent]") -> NoReturn:
    """Hand each signal to the workers the first time it comes; they run in sessions of their own and hear of none."""
    forwarded: set[int] = set()
    while True:
        number = signal.sigwait(STOP_SIGNALS)
        pids = [worker.id for agent in agents for worker in agent.get_worker_group().workers]
        if not pids or not all(isinstance(pid, int) for pid in pids):
            os._exit(128 + number)  # nothing has started yet
        if number not in forwarded:
            forwarded.add(number)
            _say(f"{signal.Signals(number).name}: the workers finish their step and save; Ctrl-\\ ends them at once")
            for pid in pids:
                _send(number, pid)


def _send(number: int, pid: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended already


def _report(result: "RunResult", *, shown: set[int], log_folder: Path) -> int:
    """Say which ranks failed, how, and why if the console has not shown it; the launcher's exit code."""
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    # The first that the codes allow to be the cause; the agent ends the others with SIGTERM.
    cause = min(codes, key=lambda rank: (codes[rank] != CONFIG_ERROR, codes[rank] == -signal.SIGTERM,
                                         codes[rank] == REQUEUE_EXIT_CODE))  # fmt: skip
    if codes[cause] == REQUEUE_EXIT_CODE:
        return REQUEUE_EXIT_CODE
    if result.failures[cause].local_rank not in shown:
        sys.stderr.write(_last_words(result.failures[cause].local_rank, log_folder=log_folder))
    if codes[cause] != CONFIG_ERROR:
        order = sorted(codes, key=lambda rank: codes[rank] == -signal.SIGTERM)
        failures = (f"rank {rank}: {_how(codes[rank])}" for rank in order)
        _say(f"training failed; logs of the ranks not shown: {log_folder}\n  " + "\n  ".join(failures))
    return _exit_code(codes[cause])


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _exit_code(code: int) -> int:
    """As a shell has it."""
    return code if code > 0 else 128 - code


def _last_words(local_rank: int, *, log_folder: Path) -> str:
    """The end of what a rank wrote to stderr, or else to stdout."""
    for stream in ("stderr", "stdout"):
        for file in log_folder.glob(f"*/*/{local_rank}/{stream}.log"):
            if lines := file.read_text(errors="replace").splitlines(keepends=True):
                return "".join(lines[-LAST_LINES:])
    return ""


def _shown_ranks(options: argparse.Namespace) -> set[int]:
    return {int(rank) for rank in options.log_rank.split(",")}


def _say(text: str) -> None:
    sys.stderr.write(f"launch: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
