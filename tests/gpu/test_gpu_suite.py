"""Sections of scripts/gpu_suite.sh, with a Python that only notes its arguments and fails where a file says so."""

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
[ "$1" != -c ] || { echo 0; exit; }
echo "$*" >>"$CALLS"
case "$*" in *$(cat "$BROKEN")*) exit 1 ;; esac
"""


@pytest.fixture
def suite(tmp_path):
    """Returns a function that runs sections and returns the finished process and the programs that it started."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    names = ("PYTHON", "CALLS", "BROKEN")
    environment = os.environ | {name: str(tmp_path / name.lower()) for name in names}

    def run(*sections: str, broken: str = "nothing"):
        (tmp_path / "broken").write_text(broken)
        (tmp_path / "calls").write_text("")
        command = [REPO / "scripts" / "gpu_suite.sh", tmp_path / "results", *sections]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done, [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def test_failed_sections_are_repeated_and_others_are_not(suite):
    _, first = suite(broken="--compile")
    benchmarks = ["trainer", "trainer", "peers", "peers", "checkpoint", "experts", "memory"]
    assert first == ["-m", *[f"benchmarks/{name}.py" for name in benchmarks]]
    done, second = suite()
    assert second == ["benchmarks/trainer.py", "benchmarks/peers.py", "benchmarks/peers.py"]
    assert "FAILED" not in done.stdout


def test_sections_can_be_chosen(suite):
    done, calls = suite("experts", "tests", broken="pytest")
    assert calls == ["benchmarks/experts.py", "-m"]
    assert "--- tests: FAILED" in done.stdout
    done, _ = suite("speed")
    assert (done.returncode, done.stderr.split(";")[0]) == (2, "error: no section speed")
