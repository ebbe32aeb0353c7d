"""Launches the training processes of this node, one per device, with torchrun's elastic agent.

Unlike torchrun it forwards the stop signals once, so that workers finish the step and save; SIGQUIT (Ctrl-\\) kills
them, and so does the launcher's death. Exit codes 2 and 75 are passed on; other failures print one short block. Exit
code 2 also creates the file that $INVALID_FILE names.
"""

import argparse
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from torchtitan_clone.config import Config, ConfigError, read_config
from torchtitan_clone.config.environment import handled_signals
from torchtitan_clone.documents import escape
from torchtitan_clone.network import LOOPBACK, InterfaceError, find_interface, is_loopback, listen
from torchtitan_clone.observe.outputs import guard_outputs, print_error
from torchtitan_clone.run.early import check_without_torch
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE

if TYPE_CHECKING:  # importing torch takes seconds; options are checked before
    from torch.distributed.elastic.agent.server import SimpleElasticAgent
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from torchtitan_clone.launch.rank_logs import RankLogs

CONFIG_ERROR = 2
TRAIN = "torchtitan_clone.train"


def main(argv: list[str]) -> int:
    """Launches the processes of this node; returns the exit code. Becomes the only process of a simulation."""
    logging.disable()  # the processes log what is said of the configuration, _report() what torchrun's agent would log
    try:
        options, arguments = _parse(argv)
        config = _read_config(options, arguments)
        if config.job.dry_run or config.comm.mode == "fake_backend":
            os.environ["WORLD_SIZE"] = str(options.nproc_per_node * options.nnodes)
            os.execv(sys.executable, [sys.executable, "-m", options.train_file, *arguments])
        _check(options)
        listen_address = _listen_address(options, interface=config.comm.interface)
    except argparse.ArgumentError as error:
        print_error(error.message)
        return CONFIG_ERROR
    except ConfigError as error:
        print_error(error)
        return CONFIG_ERROR
    numbers = handled_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # before any thread starts; workers inherit the mask
    agents: list[SimpleElasticAgent] = []
    threading.Thread(target=_forward_signals, args=(numbers, agents), daemon=True).start()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.nproc_per_node)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    if options.nnodes > 1:
        _log(f"node {options.node_rank} of {options.nnodes}: rendezvous at {_describe_rendezvous(options)}")
    rendezvous = _rendezvous(options, listen_address=listen_address)
    return _launch(options, arguments, rendezvous=rendezvous, agents=agents)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's options and the remaining arguments; ArgumentError names variables of run_train.sh."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--nproc-per-node", type=_number("NGPU", low=1), required=True)
    parser.add_argument("--nnodes", type=_number("NNODES", low=1), default=1)
    parser.add_argument("--node-rank", type=_number("NODE_RANK", low=0))
    parser.add_argument("--master-addr")  # of node 0, which hosts the rendezvous
    parser.add_argument("--master-port", type=_number("MASTER_PORT", low=1, high=65535), default=29500)
    parser.add_argument("--log-rank", default="0")  # comma-separated local ranks shown on the console
    parser.add_argument("--log-folder", type=Path)
    parser.add_argument("--train-file", default=TRAIN)  # the module that each process runs
    return parser.parse_known_args(argv)


def _check(options: argparse.Namespace) -> None:
    """ArgumentError where an option does not suit the others, or this machine. A single node is node 0 on loopback."""
    if options.nnodes == 1:
        options.node_rank, options.master_addr = options.node_rank or 0, options.master_addr or LOOPBACK
    if problem := next(_problems(options), None):
        raise argparse.ArgumentError(None, problem)


def _number(name: str, *, low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns a parser of the number that run_train.sh reads from this environment variable."""

    def parse(text: str) -> int:
        if re.fullmatch(r"-?\d+", text) and low <= int(text) <= (high or int(text)):
            return int(text)
        bounds = f"from {low} to {high}" if high else f"of at least {low}"
        raise argparse.ArgumentTypeError(f"{name} = {text}: must be an integer {bounds}")

    return parse


def _problems(options: argparse.Namespace) -> Iterator[str]:
    """Yields problems with the combination of options, or with this machine."""
    meanings = {
        "node_rank": "the index of this node, from 0",
        "master_addr": "the address of the node with NODE_RANK 0",
    }
    for name in (name for name in meanings if getattr(options, name) is None):
        yield f"NNODES = {options.nnodes} and {name.upper()} is not set; set it to {meanings[name]}"
    if options.node_rank >= options.nnodes:
        yield f"NODE_RANK = {options.node_rank}: must be at most {options.nnodes - 1} with NNODES {options.nnodes}"
    ranks = [str(rank) for rank in range(options.nproc_per_node)]
    if unknown := set(options.log_rank.split(",")) - set(ranks):
        missing = ", ".join(sorted(unknown))
        yield f"LOG_RANK = {options.log_rank}: no local rank {missing}; available: {', '.join(ranks)}"
    try:
        socket.getaddrinfo(options.master_addr, None)
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, UnicodeError) or error.errno == socket.EAI_NONAME:  # other errors may be temporary
            yield f"MASTER_ADDR = {options.master_addr}: unknown host; set it to the address of node 0"
    try:
        if options.log_folder:
            options.log_folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.log_folder).close()
    except OSError as error:
        yield f"LOG_FOLDER = {options.log_folder}: cannot write to it: {error.strerror}; set it to a writable path"


def _listen_address(options: argparse.Namespace, *, interface: str) -> str:
    """Returns the address of this machine at which node 0 listens. ArgumentError if it is not of this machine."""
    if options.nnodes == 1:
        return LOOPBACK
    try:
        if interface:
            return find_interface(interface).address
        if options.node_rank == 0:
            listen(options.master_addr).close()
    except InterfaceError as error:
        raise argparse.ArgumentError(None, f'comm.interface = "{escape(interface)}": {error}') from None
    except socket.gaierror:
        pass  # it may be temporary
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise argparse.ArgumentError(
            None,
            f"MASTER_ADDR = {options.master_addr}: node 0 cannot listen there: {reason}; set it to an address "
            "of node 0, or set comm.interface to the network interface on which node 0 listens",
        ) from None
    return options.master_addr


def _read_config(options: argparse.Namespace, arguments: list[str]) -> Config:
    """Returns the configuration; the defaults where another program reads the arguments in its own way. ConfigError."""
    try:
        loaded = read_config(arguments)
        check_without_torch(loaded.config, problems=loaded.problems)
    except ConfigError:
        if options.train_file == TRAIN:
            raise
        return Config()
    return loaded.config


def _describe_rendezvous(options: argparse.Namespace) -> str:
    """Returns the rendezvous address, with a warning if other nodes cannot reach it."""
    place = f"{options.master_addr}:{options.master_port}"
    if is_loopback(options.master_addr):
        place += ", a loopback address; set MASTER_ADDR to an address of node 0 that all nodes can reach"
    return place


def _launch(
    options: argparse.Namespace, arguments: list[str], *, rendezvous: "RendezvousHandler",
    agents: "list[SimpleElasticAgent]",
) -> int:  # fmt: skip
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        logs = _open_logs(options)
    except OSError as error:
        _log(f"no file for the output of the other ranks: {error}; set LOG_FOLDER or TMPDIR to a writable folder")
        return CONFIG_ERROR
    agent = _build_agent(options, arguments, logs=logs, rendezvous=rendezvous)
    agents.append(agent)
    try:
        result = cast("RunResult", agent.run())
    except SignalException as stop:
        _log(f"workers killed by {stop.sigval.name}")
        return 128 + stop.sigval
    except (DistError, RendezvousError) as error:
        address = f"{options.master_addr}:{options.master_port}"
        _log(f"rendezvous of {options.nnodes} nodes at {address} failed: {str(error).splitlines()[0]}")
        return 1
    return _report(result, logs=logs) if result.is_failed() else 0


def _rendezvous(options: argparse.Namespace, *, listen_address: str) -> "RendezvousHandler":
    from torchtitan_clone.launch.rendezvous import StaticRendezvous

    return StaticRendezvous(
        node=options.node_rank,
        nodes=options.nnodes,
        listen_address=listen_address,
        master_address=options.master_addr,
        port=options.master_port if options.nnodes > 1 else 0,
    )


def _open_logs(options: argparse.Namespace) -> "RankLogs":
    from torchtitan_clone.launch.rank_logs import FolderLogs, UnnamedLogs

    ranks = range(options.nproc_per_node)
    hidden = set(ranks) - {int(rank) for rank in options.log_rank.split(",")}
    if options.log_folder:
        return FolderLogs(options.log_folder, ranks=ranks, hidden=hidden)
    return UnnamedLogs(hidden=hidden)


def _build_agent(
    options: argparse.Namespace, arguments: list[str], *, logs: "RankLogs", rendezvous: "RendezvousHandler"
) -> "SimpleElasticAgent":
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    spec = WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=sys.executable,
        args=("-m", "torchtitan_clone.launch.worker", str(os.getpid()), options.train_file, *arguments),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
    )
    return LocalElasticAgent(spec, logs_specs=logs)


def _forward_signals(numbers: Collection[int], agents: "list[SimpleElasticAgent]") -> NoReturn:
    """Forwards each signal to the workers once; they run in their own sessions and receive none from the terminal."""
    forwarded: set[int] = set()
    while True:
        number = signal.sigwait(numbers)
        pids = [worker.id for agent in agents for worker in agent.get_worker_group().workers]
        if not pids or not all(isinstance(pid, int) for pid in pids):
            os._exit(128 + number)  # no worker has started yet
        if not any(map(_is_alive, pids)):
            os._exit(128 + number)  # the agent waits for those of other nodes
        if number not in forwarded:
            forwarded.add(number)
            _log(f"{signal.Signals(number).name}: workers finish the current step and save; Ctrl-\\ kills them")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has exited
                    os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _report(result: "RunResult", *, logs: "RankLogs") -> int:
    """Reports which ranks failed and how, with the log of the first if not shown; returns the exit code."""
    from torchtitan_clone.launch.rank_logs import tail

    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    # Prefer the rank that caused the failure; the agent terminates the others with SIGTERM.
    cause = min(codes, key=lambda rank: (codes[rank] != CONFIG_ERROR, codes[rank] == -signal.SIGTERM,
                                         codes[rank] == REQUEUE_EXIT_CODE))  # fmt: skip
    if codes[cause] == REQUEUE_EXIT_CODE:
        return REQUEUE_EXIT_CODE
    sys.stderr.write(tail(logs, rank=result.failures[cause].local_rank))
    if codes[cause] != CONFIG_ERROR:
        order = sorted(codes, key=lambda rank: codes[rank] == -signal.SIGTERM)
        failures = "".join(f"\n  rank {rank}: {_describe_exit(codes[rank])}" for rank in order)
        _log(f"training failed; logs of ranks that are not shown: {_keep(logs)}{failures}")
    return codes[cause] if codes[cause] > 0 else 128 - codes[cause]  # as a shell reports a signal


def _describe_exit(code: int) -> str:
    names = {each.value: each.name for each in signal.Signals}  # all but most of the real-time signals
    return f"exit code {code}" if code > 0 else f"killed by {names.get(-code, f'signal {-code}')}"


def _keep(logs: "RankLogs") -> str:
    """Keeps the logs; returns their folder, or why there is none."""
    try:
        return str(logs.keep())
    except OSError as error:
        return f"lost, {error}"


def _log(text: str) -> None:
    sys.stderr.write(f"launch: {text}\n")


def launch(argv: list[str]) -> int:
    """Does what this program does, given its options; returns the exit code."""
    guard_outputs()
    if (code := main(argv)) == CONFIG_ERROR and (invalid_file := os.environ.get("INVALID_FILE")):
        Path(invalid_file).touch()
    return code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
