"""The default process group, the device, and the settings of torch that apply to the whole process."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from shutil import which

import torch
import torch.distributed as dist

from torchtitan_clone.cache_folders import NoCodeFolderError, code_folders
from torchtitan_clone.comm.collectives import disconnect
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.environment import EnvironmentVariableError, environment_integer
from torchtitan_clone.config.schema import Comm, Compile, Debug
from torchtitan_clone.config.started import as_started
from torchtitan_clone.documents import escape
from torchtitan_clone.network import LOOPBACK, Interface, InterfaceError, choose_interface, find_interface, serve_store
from torchtitan_clone.ops.compile_cache import set_compile_cache
from torchtitan_clone.torch_compat import (
    compiler_command,
    log_compilation,
    process_groups,
    recompute_inputs_of_products,
    set_group_timeout,
)

logger = logging.getLogger("torchtitan_clone")

LOG_WAIT_AFTER_SECONDS = 10
LEAVE_WITHIN_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Rank and world size of this process, as torchrun's environment variables give them."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def from_environment() -> "Launch":
        """Reads RANK, LOCAL_RANK and WORLD_SIZE; without them this is the only process. ConfigError if invalid."""
        world_size = environment_integer("WORLD_SIZE", default=1, low=1)
        rank, local_rank = (
            environment_integer(name, default=0, high=world_size - 1) for name in ("RANK", "LOCAL_RANK")
        )
        return Launch(rank=rank, local_rank=local_rank, world_size=world_size)

    def check_peers(self) -> None:
        """ConfigError if the environment does not tell several ranks how to find each other, and each its GPU."""
        environment_integer("MASTER_PORT", default=29500, low=1, high=65535)
        absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if absent and (self.world_size > 1 or "RANK" in os.environ):
            names = ", ".join(f"${name}" for name in absent)
            remedy = f"{as_started('start with run_train.sh')}, or unset all of them"
            raise ConfigError(f"$RANK and $WORLD_SIZE need {names} too; {remedy}")
        if not torch.cuda.is_available():
            return
        if self.world_size > 1 and "LOCAL_RANK" not in os.environ:
            raise EnvironmentVariableError(
                as_started("$WORLD_SIZE needs $LOCAL_RANK too, to select a GPU; start with run_train.sh")
            )
        if self.local_rank >= (count := torch.cuda.device_count()):
            rule = f"must be below {count}, the number of GPUs that this process sees"
            remedy = "start fewer processes, or let each of them see all GPUs of its machine"
            raise EnvironmentVariableError(f"$LOCAL_RANK = {self.local_rank}: {rule}; {remedy}")


def pick_device(launch: Launch) -> torch.device:
    """Returns this process's GPU, or the CPU where there is none."""
    return torch.device("cuda", launch.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def wait_for_all_ranks(comm: Comm, *, launch: Launch, options: list[str], is_stop_wanted: Callable[[], bool]) -> bool:
    """Waits until all ranks have started; returns False on all of them if one of them wants to stop before that.

    Raises ConfigError on all ranks where the lines of `options` differ, TimeoutError after comm.init_timeout_seconds.
    """
    if launch.world_size == 1 or "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        return True
    launchers = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(_prefix("torchtitan_clone"), launchers)
    own_options = "\n".join(options)
    first_options = store.compare_set("options", "", own_options).decode()
    store.add("unlike", int(first_options != own_options))
    store.add("present", 1)
    start = time.monotonic()
    is_logged = False
    present = 0
    while (seconds := time.monotonic() - start) < comm.init_timeout_seconds:
        present = store.add("present", 0)
        if present == launch.world_size or is_stop_wanted():
            if store.add("unlike", 0):
                raise ConfigError(_describe_difference(own_options, first_options))
            # The first rank to get here decides for all.
            own_verdict = "start" if present == launch.world_size else "stop"
            return store.compare_set("verdict", "", own_verdict) == b"start"
        if seconds > LOG_WAIT_AFTER_SECONDS and not is_logged:
            is_logged = True
            logger.info("%d of %d ranks have started; waiting for the others", present, launch.world_size)
        time.sleep(0.02)
    raise TimeoutError(
        f"{present} of {launch.world_size} ranks came within comm.init_timeout_seconds = {comm.init_timeout_seconds}"
    )


def _describe_difference(own: str, others: str) -> str:
    lines = [line for line in own.splitlines() if line not in others.splitlines()]
    found = f": {', '.join(lines)} here, otherwise elsewhere" if lines else ""
    return f"the nodes were started with different options{found}; start all with the same files and arguments"


@contextmanager
def process_group(comm: Comm, *, launch: Launch, device: torch.device, peers_host: str | None = None) -> Iterator[None]:
    """Creates the default process group: gloo for CPU tensors, NCCL for CUDA tensors. One process needs no torchrun.

    All sockets of this and later groups belong to the interface that choose_run_interface() returns.
    """
    _bind_backends(comm, interface=choose_run_interface(comm, peers_host=peers_host))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Read when the first group is created: the number of collectives that the flight recorder keeps.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    store = _open_store(comm, launch=launch, timeout=timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.world_size)
    # Not destroyed after an error: that may wait for a rank that is gone, and the process ends anyway.
    yield
    disconnect(process_groups())
    _leave(store, launch=launch)
    dist.destroy_process_group()


def _open_store(comm: Comm, *, launch: Launch, timeout: timedelta) -> dist.Store:
    """Returns the store of all ranks: the launcher's, or one that rank 0 serves if another program started them."""
    if "RANK" not in os.environ:  # $MASTER_ADDR alone may be set for other reasons, for example in a Slurm job
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        address = find_interface(comm.interface).address if comm.interface else host
        return dist.PrefixStore(_prefix("default_pg"), serve_store(address, port=port, timeout=timeout))
    return dist.PrefixStore(_prefix("default_pg"), dist.TCPStore(host, port, is_master=False, timeout=timeout))


def _leave(store: dist.Store, *, launch: Launch) -> None:
    """Waits on the rank that serves the store until the others need it no more, or have ended without a word."""
    if launch.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    end = time.monotonic() + LEAVE_WITHIN_SECONDS
    with suppress(RuntimeError):  # rank 0 has ended
        left = store.add("left", 1)
        while launch.rank == 0 and left < launch.world_size and time.monotonic() < end:
            time.sleep(0.02)
            left = store.add("left", 0)


def _prefix(name: str) -> str:
    """Returns a prefix of keys in the launcher's store, which holds those of earlier starts of its ranks too."""
    return f"{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def choose_run_interface(comm: Comm, *, peers_host: str | None) -> Interface | None:
    """Returns the interface over which ranks and replica groups communicate; `peers_host` is where they meet.

    It is loopback if rank 0 and that host are this machine, and None if there is no route to them.
    """
    masters = [os.environ["MASTER_ADDR"]] if {"RANK", "MASTER_ADDR"} <= os.environ.keys() else []
    return choose_interface(comm.interface, hosts=[*masters, *([peers_host] if peers_host else [])])


def check_interface(comm: Comm) -> None:
    """Raises ConfigError if this machine lacks the interface that comm.interface names."""
    try:
        choose_interface(comm.interface, hosts=())
    except InterfaceError as error:
        raise ConfigError(f'comm.interface = "{escape(comm.interface)}": {error}') from None


def _bind_backends(comm: Comm, *, interface: Interface | None) -> None:
    """Binds gloo and NCCL to an interface. By default gloo listens at the address that the host name resolves to."""
    if interface is None or not interface.name:
        return
    if comm.interface or interface.address == LOOPBACK:
        os.environ["GLOO_SOCKET_IFNAME"] = interface.name
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface.name}"  # without "=" a prefix of names
    else:  # NCCL finds the interfaces between nodes by itself
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface.name)


def set_timeout(seconds: int) -> None:
    """Sets the timeout of later collectives in all process groups."""
    for group in process_groups():
        set_group_timeout(group, timedelta(seconds=seconds))


def check_compiler(options: Compile, *, device_type: str) -> None:
    """ConfigError if this machine lacks the compiler of C++ that torch.compile calls on a CPU."""
    needs_compiler = options.enable and options.backend == "inductor" and device_type == "cpu"
    if needs_compiler and which(compiler := compiler_command()) is None:
        raise ConfigError(
            f"compile.enable = true: on a CPU torch.compile needs a compiler of C++, and {escape(compiler)} is "
            "not on $PATH; install g++, set $CXX to the command of another compiler, or set compile.enable to false"
        )


def set_up_compile(options: Compile, *, device_type: str) -> None:
    """Configures torch.compile if it is enabled."""
    is_cpu = device_type == "cpu"  # where the loss is not compiled
    try:
        if not is_cpu:  # this package has kernels of Triton, whose cache is also in the home by default
            chosen = os.environ.get("TRITON_CACHE_DIR", "")
            os.environ["TRITON_CACHE_DIR"] = str(code_folders("triton", chosen=chosen)[-1])
        if options.compiles_model if is_cpu else options.enable:
            set_compile_cache(options.backend)
    except NoCodeFolderError as error:
        raise ConfigError(f"compiled code cannot be kept: {error}") from None
    if is_cpu and options.compiles_model:
        recompute_inputs_of_products()


def apply_debug_options(debug: Debug, *, launch: Launch, tensor_degree: int) -> None:
    """Seeds torch's generators; with `debug.deterministic` forbids algorithms whose results vary."""
    if debug.explain_compile:
        log_compilation()
    # Ranks of one `tp` group draw equal numbers: tensors that they replicate must stay equal.
    torch.manual_seed(debug.seed + launch.rank // tensor_degree)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
