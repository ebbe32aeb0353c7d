"""Logger of the package: INFO from rank 0; WARNING and above from every rank, with the rank.

A message is one line: its control characters are escaped, and the lines of an exception are indented, so that a name
or a path cannot forge a line of the log.
"""

import logging
import os
import sys
import traceback

from torchtitan_clone.documents import escape

logger = logging.getLogger("torchtitan_clone")

COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
DIM = "\033[2m"
PLAIN = "\033[0m"


class _Formatter(logging.Formatter):
    def __init__(self, *, rank: int, color: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self.rank = rank
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, self.datefmt)
        label = f"{record.levelname} [rank {self.rank}] " if record.levelno >= logging.WARNING else ""
        if self.color:
            time = f"{DIM}{time}{PLAIN}"
            label = label and f"{COLORS[record.levelno]}{label}{PLAIN}"
        text = f"{time} {label}{escape(record.getMessage())}"
        error = record.exc_info[1] if record.exc_info else None
        return "\n".join([text, *_describe(error)]) if error else text


def _describe(error: BaseException) -> list[str]:
    """Returns the lines of a traceback; only frames and the first line of a message begin where lines of a log do."""
    pieces = [piece.strip("\n").split("\n") for piece in traceback.format_exception(error)]
    return [
        f"{'    ' if number and not piece[0].startswith('  ') else ''}{escape(line)}"
        for piece in pieces
        for number, line in enumerate(piece)
    ]


def setup_logging(*, rank: int, color: bool) -> None:
    """Logs the package to stdout, in color only on a terminal without NO_COLOR; replaces an earlier setup."""
    handler = logging.StreamHandler(sys.stdout)
    color = color and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(_Formatter(rank=rank, color=color))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
