"""The one logger of the package: INFO from rank 0, WARNING and above from every rank, with the rank."""

import logging
import os
import sys

logger = logging.getLogger("torchtitan_clone")

COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
DIM, PLAIN = "\033[2m", "\033[0m"


class _Formatter(logging.Formatter):
    def __init__(self, *, rank: int, color: bool) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self.rank = rank
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        """time message, or from WARNING on: time LEVEL [rank N] message."""
        time, label = self.formatTime(record, self.datefmt), ""
        if record.levelno >= logging.WARNING:
            label = f"{record.levelname} [rank {self.rank}] "
        if self.color:
            time, label = f"{DIM}{time}{PLAIN}", label and f"{COLORS[record.levelno]}{label}{PLAIN}"
        text = f"{time} {label}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def setup_logging(*, rank: int, color: bool) -> None:
    """Send the package's log to stdout. Colors only on a terminal, and not where NO_COLOR is set; callable again."""
    handler = logging.StreamHandler(sys.stdout)
    color = color and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(_Formatter(rank=rank, color=color))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
