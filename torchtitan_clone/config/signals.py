"""The signals that ask a run to stop. Imports nothing heavy: handlers are installed before torch is imported."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Sent by a scheduler to every process of a job, or by a terminal (Ctrl-C, closing it) to its foreground processes."""


def handled_signals() -> tuple[signal.Signals, ...]:
    """Returns the stop signals without a SIGHUP that this process ignores because it was started by nohup."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_nohup and number is signal.SIGHUP))
