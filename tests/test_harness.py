"""How ranks of tests that fail are reported (harness.py)."""

import os
import signal

import pytest

from tests.support.harness import RankFailed, run_ranks
from tests.support.runs import redirect_output


def abort(log):
    """Ends as glibc does when it finds its heap corrupted."""
    redirect_output(log)
    os.abort()


def test_a_rank_that_aborts_prints_what_its_threads_ran(tmp_path):
    log = tmp_path / "output"
    with pytest.raises(RankFailed, match=f"with exit code {-signal.SIGABRT}$"):
        run_ranks(abort, 1, log)
    assert "Fatal Python error: Aborted" in log.read_text()
    assert "in abort\n" in log.read_text()


def end(number):
    """Ends rank 1 by a signal, or with an exit code."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), -number) if number < 0 else os._exit(number)


@pytest.mark.parametrize("code", [3, -signal.SIGKILL])
def test_the_exit_code_of_a_rank_without_a_value_is_named(code):
    with pytest.raises(RankFailed, match=f"^rank 1 ended without returning a value, with exit code {code}$"):
        run_ranks(end, 2, code)
