"""Runs a compiler that ends with the process that started it; imports only the standard library.

    python -I -S compiler_guard.py PARENT_PID SECONDS COMMAND...

g++ starts further processes, which the kernel does not end with it, and which would compute on for nobody. They form a
group, which this program ends if the parent is gone, after SECONDS, or at a signal. Its exit status is the compiler's.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ENDED, NOT_STARTED = 124, 127  # exit statuses, as of timeout(1)
POLL_SECONDS = 0.1
SECONDS_TO_CLEAN_UP = 1


def main(parent: int, seconds: float, *, command: list[str]) -> int:
    """Returns the exit status of the command; ENDED if it was ended."""
    with suppress(PermissionError):  # this process leads a session already
        os.setsid()  # Ctrl-C is for the run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ENDED))
    end = time.monotonic() + seconds
    folder = tempfile.mkdtemp(prefix="torchtitan_clone-compiler-")
    try:
        compiler = subprocess.Popen(command, start_new_session=True, env={**os.environ, "TMPDIR": folder})
        try:
            while os.getppid() == parent and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    return compiler.wait(POLL_SECONDS)
            return ENDED
        finally:
            _end(compiler)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_STARTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if os.getppid() != parent and "-o" in command:  # nobody is left who would use it
            Path(command[command.index("-o") + 1]).unlink(missing_ok=True)


def _end(compiler: "subprocess.Popen[bytes]") -> None:
    """Ends all processes of the compiler; SIGTERM lets it remove its files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(compiler.pid, number)
        with suppress(subprocess.TimeoutExpired):
            compiler.wait(SECONDS_TO_CLEAN_UP)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), command=sys.argv[3:]))
