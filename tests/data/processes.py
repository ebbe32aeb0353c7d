"""Observes processes through /proc."""

import time
from pathlib import Path


def wait_for(condition):
    """Returns the first true value of a condition; a condition that never holds ends with the test's own timeout."""
    while not (value := condition()):
        time.sleep(0.005)
    return value


def children(pid: int) -> list[int]:
    """Returns the child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_alive(pid: int) -> bool:
    """Returns whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is reaped
        return False
