"""Logger of the package: INFO from rank 0; WARNING and above from every rank, with the rank."""

import logging
import os
import sys

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
        text = f"{time} {label}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup_logging(*, rank: int, color: bool) -> None:
    """Logs the package to stdout, in color only on a terminal without NO_COLOR; replaces an earlier setup."""
    handler = logging.StreamHandler(sys.stdout)
    color = color and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(_Formatter(rank=rank, color=color))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
