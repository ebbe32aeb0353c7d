"""The signals that ask a run to stop. Imports nothing heavy: handlers are installed before torch is imported."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Sent by a scheduler to every process of a job, or by a terminal (Ctrl-C) to its foreground processes."""
