"""Sections of scripts/gpu_suite.sh, with a Python that only notes its arguments and fails where a file says so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_results, variants
from torchtitan_clone.config import load_config

REPO = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$1" in -c) echo 2; exit ;; benchmarks/gpu_results.py) exec "$REAL" "$@" ;; esac
printf '%s\\037' "$@" >>"$CALLS"
echo >>"$CALLS"
echo "results of $2"
case "$*" in *$(cat "$BROKEN")*) echo boom >&2; exit 1 ;; esac
"""


@pytest.fixture
def suite(tmp_path):
    """Returns a function that runs sections and returns the finished process and the commands that it started."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    names = ("PYTHON", "CALLS", "BROKEN")
    paths = {name: str(tmp_path / name.lower()) for name in names}
    environment = os.environ | {"WHEELS": "", "REAL": sys.executable, **paths}

    def run(*sections: str, broken: str = "nothing"):
        (tmp_path / "broken").write_text(broken)
        (tmp_path / "calls").write_text("")
        command = [REPO / "scripts" / "gpu_suite.sh", tmp_path / "results", *sections]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done, [line.split("\037")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def test_failed_sections_are_repeated_and_others_are_not(suite, tmp_path):
    done, first = suite(broken="--skip-cold --only ours ours, graph nanoGPT")
    repeated = [("peers", 2), ("attention", 2), ("peers", 2), ("variants", 1), ("experts", 1), ("variants", 1)]
    repeated += [("memory", 1), ("checkpoint", 1), ("parallel", 1)]
    names = [name for name, count in repeated for _ in range(count)]
    folders = {"memory": "tests/campaigns"}
    expected = ["-m", *[f"{folders.get(name, 'benchmarks')}/{name}.py" for name in names]]
    assert [call[0] for call in first] == expected
    assert (done.returncode, done.stdout.splitlines().count("boom")) == (1, 1)
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [name for name, section in results["sections"].items() if section["seconds"] is None] == ["peers"]
    done, second = suite()
    assert [call[0] for call in second] == ["benchmarks/peers.py"] * 2
    assert (done.returncode, "FAILED" in done.stdout) == (0, False)
    lines = done.stdout.splitlines()[-11:]
    assert sorted(line.split()[0] for line in lines) == sorted(results["sections"])
    assert (tmp_path / "results" / "summary.txt").read_text() == done.stdout


def test_sections_can_be_chosen(suite):
    done, calls = suite("experts", "tests", broken="pytest")
    assert [call[0] for call in calls] == ["benchmarks/experts.py", "-m"]
    assert re.search("^tests +FAILED +results of pytest$", done.stdout, re.MULTILINE)
    done, calls = suite("experts", "speed")
    assert (done.returncode, done.stderr.split(";")[0], calls) == (2, "error: no section speed", [])


def test_limits_are_those_of_three_calls_of_ten_minutes():
    """As sections are grouped in the first lines of the script: each group at most 600 s, all less than 25 min."""
    text = (REPO / "scripts" / "gpu_suite.sh").read_text()
    header, script = text.split("set -uo pipefail")
    groups = [re.findall(r"^#   (\w+) +\S", group, re.MULTILINE) for group in header.split("\n#\n")[-3:]]
    seconds = {name: 0 for group in groups for name in group}
    for name, limit in re.findall(r"\brun (\w+) (\d+) ", script):
        seconds[name] += int(limit)
    assert all(seconds.values())
    seconds.pop("parallel")  # which one GPU does not run
    assert max(sum(seconds.get(name, 0) for name in group) for group in groups) <= 600
    assert sum(seconds.values()) < 25 * 60


def test_commands_of_the_suite_have_options_that_exist(suite, python):
    helps = {}
    for file, *arguments in suite()[1]:
        if file == "-m":
            assert all((REPO / path).exists() for path in arguments if path.startswith("tests"))
            continue
        end = arguments.index("--") if "--" in arguments else len(arguments)
        common = arguments[end + 1 :]
        if file.endswith("variants.py"):
            named = [argument for argument in arguments[:end] if not argument.startswith("--")]
            for _, options in map(variants.variant, named):
                load_config([*variants.COMMON, *common, *options])
        elif common:
            load_config(common)
        if file not in helps:
            command = [python, file, "--help"]
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
            helps[file] = done.stdout
        for option in (argument.split("=")[0] for argument in arguments[:end] if argument.startswith("--")):
            assert re.search(rf"^  {option}\b", helps[file], re.MULTILINE), (file, option)


def test_figures_of_benchmarks_are_collected(tmp_path, capsys):
    (tmp_path / "long.err").write_text("warning\n")
    (tmp_path / "long.txt").write_text("a table\n")
    (tmp_path / "long.json").write_text('{"steps": 5}')
    (tmp_path / "float8.json").write_text('{"steps": ')  # its program was killed
    gpu_results.main(tmp_path)
    gpu_results.main(tmp_path)  # reads what it wrote
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["figures"] == {"long": {"steps": 5}, "float8": None}
    assert results["sections"]["long"] == {"seconds": None, "output": ["a table"], "errors": ["warning"]}
    assert capsys.readouterr().out.endswith("long          FAILED  a table\n")
