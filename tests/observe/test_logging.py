"""Levels per rank, and the format of log lines."""

import subprocess
import sys

PROGRAM = """
import sys
from torchtitan_clone.observe.logging import logger, setup_logging
setup_logging(rank={rank}, color=True)
logger.info("training")
logger.warning("disk is full")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("broken")
print("torch" in sys.modules)
"""


def lines(rank: int) -> list[str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(rank=rank)], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout.splitlines()


def test_rank_0_logs_all_levels_without_color_in_a_pipe():
    info, warning, error, *trace, torch_imported = lines(0)
    assert info.split(" ", 2)[2] == "training"
    assert warning.split(" ", 2)[2] == "WARNING [rank 0] disk is full"
    assert error.split(" ", 2)[2] == "ERROR [rank 0] broken"
    assert trace[-1] == "ZeroDivisionError: division by zero"
    assert torch_imported == "False"


def test_other_ranks_log_warnings_only():
    assert lines(3)[0].split(" ", 2)[2] == "WARNING [rank 3] disk is full"
