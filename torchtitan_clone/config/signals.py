"""Signals that ask a run to stop."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What a terminal, a user or a cluster sends to end a run; the trainer saves a checkpoint and exits."""
