"""A stand-in for the Python interpreter, for tests of commands: its processes come from a forkserver that has torch.

Importing torch takes most of the time of a short command. What a command runs, it runs in a process of its own, with
the arguments, variables, folder and streams that it was started with; signals and exit codes pass through.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Protocol, Self

import torch

from tests.support import harness as harness  # which modules the forkserver loads

STREAMS = 3
MAX_REQUEST = 1 << 20
WORKER = "torchtitan_clone.launch.worker"
"""Must be the interpreter's own process, since it checks who started it; then it becomes the stand-in again."""
SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
options = [word for word in words[:2] if word in ("-u", "-P")]
rest = words[len(options):]
if rest[:2] == ["-m", {worker!r}]:
    boot = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module({worker!r}, run_name='__main__')"
    os.execv({python!r}, [{python!r}, "-c", boot, sys.argv[0], *rest[2:]])
if not rest or (rest[0].startswith("-") and rest[0] != "-m") or "-P" in options:
    os.execv({python!r}, [{python!r}, *words])
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
request = dict(words=rest, environment=dict(os.environ), folder=os.getcwd(), executable=sys.argv[0], blocked=blocked)
data = json.dumps(request).encode()
socket.send_fds(connection, [len(data).to_bytes(4, "big")], [0, 1, 2])
connection.sendall(data)
numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
for number in numbers:
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # a launcher blocks them while its workers start
answer = connection.recv(4)
code = int.from_bytes(answer, "big", signed=True) if answer else 1
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class _Stream:
    """A file descriptor that goes with the request for a process, which finds its number in place of this object.

    A DupFd made before that request would stay open here if the process were killed before it asked for it, and
    who reads the other end would wait forever.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[["_Inherited"], int], tuple["_Inherited"]]:
        return _detach, (DupFd(self._fd),)


class _Inherited(Protocol):
    def detach(self) -> int: ...


def _detach(inherited: _Inherited) -> int:
    return inherited.detach()


class WarmPython:
    """Serves the stand-in `python` in a folder, until it is closed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.executable = folder / "python"
        address = str(folder / "socket")
        self.executable.write_text(SCRIPT.format(python=sys.executable, address=address, worker=WORKER))
        self.executable.chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Runs what one start of the stand-in asks for; kills it if the stand-in is killed."""
    with connection:
        size, fds, *_ = socket.recv_fds(connection, 4, STREAMS)
        try:
            length = int.from_bytes(size, "big")
            data = connection.recv(length, socket.MSG_WAITALL)
            if not data or len(data) < length:  # the stand-in was killed
                return
            streams = [_Stream(fd) for fd in fds]
            masked, mask = multiprocessing.Pipe(duplex=False)
            arguments = (streams, json.loads(data), mask)
            process = multiprocessing.get_context("forkserver").Process(target=_run, args=arguments)
            process.start()
            mask.close()
        finally:
            for fd in fds:
                os.close(fd)
        wait([process.sentinel, masked])  # a signal before would end a process that blocks it
        masked.close()
        while connection in wait([process.sentinel, connection]):
            if not (signals := connection.recv(1)):
                process.kill()
                break
            os.kill(process.pid or 0, signals[0])
        process.join()
        with contextlib.suppress(OSError):  # the stand-in was killed
            connection.sendall((process.exitcode or 0).to_bytes(4, "big", signed=True))


def _run(streams: list[int], request: dict, masked: Connection) -> None:
    """Does in this process what the interpreter does with these arguments."""
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    masked.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Also where the tests were started with it ignored, as a shell starts what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the new process follows its own $TMPDIR
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    # Processes that the command starts come from the same forkserver.
    vars(forkserver._forkserver)["ensure_running"] = lambda: None
    words = request["words"]
    sys.executable = request["executable"]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[0] = os.getcwd() if is_module else str(Path(words[0]).resolve().parent)
    code = 0
    try:
        if is_module:
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001, as the interpreter does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
