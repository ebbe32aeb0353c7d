"""First program of a launched process; imports only the standard library, so that training starts sooner."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> NoReturn:
    """Becomes `python -m MODULE ARGUMENTS`, given as LAUNCHER_PID MODULE ARGUMENTS; dies if the launcher dies."""
    launcher_pid, module, *arguments = argv
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # survives exec
    if os.getppid() != int(launcher_pid):  # the launcher died before prctl took effect
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
