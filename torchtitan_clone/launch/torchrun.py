"""Launches the training processes of this node, one per device, with torchrun's elastic agent.

Unlike torchrun it forwards STOP_SIGNALS once, so that workers finish the step and save; SIGQUIT (Ctrl-\\) kills them,
and so does the launcher's death. Exit codes 2 and 75 are passed on; other failures print one short block.
"""

import argparse
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.signals import STOP_SIGNALS
from torchtitan_clone.documents import escape
from torchtitan_clone.network import LOOPBACK, InterfaceError, find_interface, is_loopback, listen
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE

if TYPE_CHECKING:  # importing torch takes seconds; options are checked before
    from torch.distributed.elastic.agent.server import SimpleElasticAgent
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.rendezvous import RendezvousHandler

CONFIG_ERROR = 2
LAST_LINES = 20


def main(argv: list[str]) -> int:
    """Launches the processes of this node; returns the exit code."""
    try:
        options, arguments = _parse(argv)
        listen_address = _listen_address(options, arguments)
    except argparse.ArgumentError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return CONFIG_ERROR
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # before any thread starts; workers inherit the mask
    agents: list[SimpleElasticAgent] = []
    threading.Thread(target=_forward_signals, args=(agents,), daemon=True).start()
    logging.disable()  # _report() reports what torchrun's agent would log
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.nproc_per_node)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    if options.nnodes > 1:
        _log(f"node {options.node_rank} of {options.nnodes}: rendezvous at {_describe_rendezvous(options)}")
    log_folder = options.log_folder or Path(tempfile.mkdtemp(prefix="torchtitan_clone_"))
    rendezvous = _rendezvous(options, listen_address=listen_address)
    agent = _build_agent(options, arguments, log_folder=log_folder, rendezvous=rendezvous)
    agents.append(agent)
    code = _launch(options, agent=agent, log_folder=log_folder)
    if code in (0, CONFIG_ERROR, REQUEUE_EXIT_CODE) and not options.log_folder:
        shutil.rmtree(log_folder)
    return code


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's options and the remaining arguments; ArgumentError names variables of run_train.sh."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--nproc-per-node", type=_number("NGPU", low=1), required=True)
    parser.add_argument("--nnodes", type=_number("NNODES", low=1), default=1)
    parser.add_argument("--node-rank", type=_number("NODE_RANK", low=0), default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")  # of node 0, which hosts the rendezvous
    parser.add_argument("--master-port", type=_number("MASTER_PORT", low=1, high=65535), default=29500)
    parser.add_argument("--log-rank", default="0")  # comma-separated local ranks shown on the console
    parser.add_argument("--log-folder", type=Path)
    parser.add_argument("--module", default="torchtitan_clone.train")
    options, arguments = parser.parse_known_args(argv)
    if problem := next(_problems(options), None):
        raise argparse.ArgumentError(None, problem)
    return options, arguments


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
    if options.node_rank >= options.nnodes:
        yield f"NODE_RANK = {options.node_rank}: must be at most {options.nnodes - 1} with NNODES {options.nnodes}"
    ranks = [str(rank) for rank in range(options.nproc_per_node)]
    if unknown := set(options.log_rank.split(",")) - set(ranks):
        missing = ", ".join(sorted(unknown))
        yield f"LOG_RANK = {options.log_rank}: no local rank {missing}; available: {', '.join(ranks)}"
    try:
        socket.getaddrinfo(options.master_addr, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:  # other errors may be temporary
            yield f"MASTER_ADDR = {options.master_addr}: unknown host; set it to the address of node 0"
    try:
        if options.log_folder:
            options.log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"LOG_FOLDER = {options.log_folder}: cannot create it: {error.strerror}; set it to a writable path"


def _listen_address(options: argparse.Namespace, arguments: list[str]) -> str:
    """Returns the address of this machine at which node 0 listens. ArgumentError if it is not of this machine."""
    if options.nnodes == 1:
        return LOOPBACK
    name = _interface_option(arguments)
    try:
        if name:
            return find_interface(name).address
        if options.node_rank == 0:
            listen(options.master_addr).close()
    except InterfaceError as error:
        raise argparse.ArgumentError(None, f'comm.interface = "{escape(name)}": {error}') from None
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


def _interface_option(arguments: list[str]) -> str:
    try:
        return load_config(arguments).comm.interface
    except ConfigError:  # the workers report it
        return ""


def _describe_rendezvous(options: argparse.Namespace) -> str:
    """Returns the rendezvous address, with a warning if other nodes cannot reach it."""
    place = f"{options.master_addr}:{options.master_port}"
    if is_loopback(options.master_addr):
        place += ", a loopback address; set MASTER_ADDR to an address of node 0 that all nodes can reach"
    return place


def _launch(options: argparse.Namespace, *, agent: "SimpleElasticAgent", log_folder: Path) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        result = cast("RunResult", agent.run())
    except SignalException as stop:
        _log(f"workers killed by {stop.sigval.name}")
        return 128 + stop.sigval
    except (DistError, RendezvousError) as error:
        address = f"{options.master_addr}:{options.master_port}"
        _log(f"rendezvous of {options.nnodes} nodes at {address} failed: {str(error).splitlines()[0]}")
        return 1
    return _report(result, shown=_shown_ranks(options), log_folder=log_folder) if result.is_failed() else 0


def _rendezvous(options: argparse.Namespace, *, listen_address: str) -> "RendezvousHandler":
    from torchtitan_clone.launch.rendezvous import StaticRendezvous

    return StaticRendezvous(
        node=options.node_rank,
        nodes=options.nnodes,
        listen_address=listen_address,
        master_address=options.master_addr,
        port=options.master_port if options.nnodes > 1 else 0,
    )


def _build_agent(
    options: argparse.Namespace, arguments: list[str], *, log_folder: Path, rendezvous: "RendezvousHandler"
) -> "SimpleElasticAgent":
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    spec = WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        entrypoint=sys.executable,
        args=("-m", "torchtitan_clone.launch.worker", str(os.getpid()), options.module, *arguments),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
    )
    shown = _shown_ranks(options)
    to_files = {rank: Std.NONE if rank in shown else Std.ALL for rank in range(options.nproc_per_node)}
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(log_folder), redirects=to_files))


def _forward_signals(agents: "list[SimpleElasticAgent]") -> NoReturn:
    """Forwards each signal to the workers once; they run in their own sessions and receive none from the terminal."""
    forwarded: set[int] = set()
    while True:
        number = signal.sigwait(STOP_SIGNALS)
        pids = [worker.id for agent in agents for worker in agent.get_worker_group().workers]
        if not pids or not all(isinstance(pid, int) for pid in pids):
            os._exit(128 + number)  # no worker has started yet
        if number not in forwarded:
            forwarded.add(number)
            _log(f"{signal.Signals(number).name}: workers finish the current step and save; Ctrl-\\ kills them")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has exited
                    os.kill(pid, number)


def _report(result: "RunResult", *, shown: set[int], log_folder: Path) -> int:
    """Reports which ranks failed and how, with the log of the first if not shown; returns the exit code."""
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    # Prefer the rank that caused the failure; the agent terminates the others with SIGTERM.
    cause = min(codes, key=lambda rank: (codes[rank] != CONFIG_ERROR, codes[rank] == -signal.SIGTERM,
                                         codes[rank] == REQUEUE_EXIT_CODE))  # fmt: skip
    if codes[cause] == REQUEUE_EXIT_CODE:
        return REQUEUE_EXIT_CODE
    if result.failures[cause].local_rank not in shown:
        sys.stderr.write(_log_tail(result.failures[cause].local_rank, log_folder=log_folder))
    if codes[cause] != CONFIG_ERROR:
        order = sorted(codes, key=lambda rank: codes[rank] == -signal.SIGTERM)
        failures = "".join(f"\n  rank {rank}: {_describe_exit(codes[rank])}" for rank in order)
        _log(f"training failed; logs of ranks that are not shown: {log_folder}{failures}")
    return codes[cause] if codes[cause] > 0 else 128 - codes[cause]  # as a shell reports a signal


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _log_tail(local_rank: int, *, log_folder: Path) -> str:
    """Returns the last lines of a rank's stderr, or of its stdout if stderr is empty."""
    for stream in ("stderr", "stdout"):
        for file in log_folder.glob(f"*/*/{local_rank}/{stream}.log"):
            if lines := file.read_text(errors="replace").splitlines(keepends=True):
                return "".join(lines[-LAST_LINES:])
    return ""


def _shown_ranks(options: argparse.Namespace) -> set[int]:
    return {int(rank) for rank in options.log_rank.split(",")}


def _log(text: str) -> None:
    sys.stderr.write(f"launch: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
