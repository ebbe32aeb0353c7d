"""What a process is told from outside: numbers in environment variables, and the signals that ask it to stop."""

import os
import re
import signal

from torchtitan_clone.config.messages import ConfigError, shown
from torchtitan_clone.config.started import as_started

MAX_WORLD_SIZE = 2**17


class EnvironmentVariableError(ConfigError):
    """An environment variable has an invalid value, so that the process cannot know its place among the others."""


def environment_integer(name: str, *, default: int, low: int = 0, high: int = MAX_WORLD_SIZE) -> int:
    """Returns the integer in an environment variable, `default` without it; an error if it is not in [low, high]."""
    text = os.environ.get(name, str(default))
    if re.fullmatch(r"[0-9]{1,18}", text) and low <= int(text) <= high:
        return int(text)
    remedy = f"unset it, or {as_started('start with run_train.sh')}"
    raise EnvironmentVariableError(f"${name} = {shown(text)}: must be an integer from {low:,} to {high:,}; {remedy}")


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Sent by a scheduler to every process of a job, or by a terminal (Ctrl-C, closing it) to its foreground processes."""


def handled_signals() -> tuple[signal.Signals, ...]:
    """Returns the stop signals without a SIGHUP that this process ignores because it was started by nohup."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_nohup and number is signal.SIGHUP))
