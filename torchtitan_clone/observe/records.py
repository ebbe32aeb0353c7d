"""Files of a run folder beside metrics.jsonl that only the report reads; rank 0 writes them, and training reads none.

A disk error (full, quota) loses what was to be written, but does not stop training.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torchtitan_clone.observe.logging import logger

SAVED = "checkpoint saved"
RECOVERED = "recovered from another replica group"
REWOUND = "rewound after spikes"
"""Events of metrics.jsonl that the report marks."""
STARTS_FILE = "starts.jsonl"
"""One line for each start of the run: when, after which step, the last sign of life before, and the environment."""
BREAKDOWNS_FILE = "step_breakdowns.jsonl"
"""One line for each step of comm.straggler_freq: the seconds of every rank."""
TIMELINE_FILE = "timeline.json"
"""The collectives of the latest such step."""
LOADS_FILE = "expert_load.json"
"""Tokens of each expert in the latest logged step, by router."""
PIPELINE_FILE = "pipeline.json"
"""The actions of a pass through the pipeline, in units of one forward."""


def append_record(file: Path, record: dict[str, object]) -> None:
    """Appends a line."""
    ignore_disk_errors(_append, file, record)


def replace_record(file: Path, record: dict[str, object]) -> None:
    """Writes a file under another name and renames it; does not wait for the disk."""
    ignore_disk_errors(_replace, file, record)


def open_to_append(file: Path) -> TextIO:
    """Opens a file of rows; OSError for a link, a pipe or a device, which could lead anywhere or block."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(os.open(file, flags, 0o644), "a", encoding="utf-8")


def ignore_disk_errors(write: Callable[..., None], *arguments: object, what: str = "metrics") -> None:
    """Calls `write`; an OSError is logged as one of what cannot be written."""
    try:
        write(*arguments)
    except OSError as error:
        logger.warning("%s cannot be written: %s", what, error)


def _append(file: Path, record: dict[str, object]) -> None:
    with open_to_append(file) as stream:
        stream.write(json.dumps(record, allow_nan=False) + "\n")


def _replace(file: Path, record: dict[str, object]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)  # left by a killed process; opening a pipe would block, a link write elsewhere
    with partial.open("x", encoding="utf-8") as stream:
        json.dump(record, stream, allow_nan=False)
    partial.rename(file)
