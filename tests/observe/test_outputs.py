"""Outputs that are closed, or whose disk is full."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PATH = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

LIBRARY = """
import os
from torchtitan_clone.observe.outputs import guard_outputs
guard_outputs()
with open("row", "w") as file:
    os.write(1, b"printed by a library")
    os.write(2, b"printed by a library")
    file.write("row")
"""


def test_a_file_does_not_take_the_place_of_a_closed_output(tmp_path):
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", LIBRARY]
    assert subprocess.run(command, cwd=tmp_path, env=PATH, check=False).returncode == 0
    assert (tmp_path / "row").read_text() == "row"


def test_the_disk_of_a_log_may_be_full_for_a_while(tmp_path):
    program = """
import resource
from torchtitan_clone.observe.logging import logger, setup_logging
from torchtitan_clone.observe.outputs import guard_outputs
guard_outputs()
setup_logging(rank=0, color=False)
for text, size in (("first", 1000), ("lost", 40), ("last", 1000)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    logger.info("%s", text)
"""
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=PATH, stdout=log, stderr=subprocess.PIPE, text=True, check=True)
    assert done.stderr == ("note: standard output cannot be written (File too large); what is printed there is lost\n")
    text = (tmp_path / "log").read_text()
    assert (text.count("first"), text.count("lost"), text.count("last")) == (1, 0, 1)


def test_a_non_blocking_output_loses_nothing():
    program = """
import os
from torchtitan_clone.observe.outputs import guard_outputs
guard_outputs()
os.set_blocking(1, False)
print("x" * 1_000_000)
"""
    command = ["sh", "-c", '"$@" | { sleep 0.2; cat; }', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, env=PATH, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("x" * 1_000_000 + "\n", "")


SCRIPT = """
import sys, time
from torchtitan_clone.config import ConfigError
from torchtitan_clone.observe.outputs import reports_errors

@reports_errors
def main():
    print("started", flush=True)
    {body}
    return 0

sys.exit(main())
"""


def start_script(body: str) -> subprocess.Popen[str]:
    """Starts a script whose main function has this body, and waits until it runs."""
    command = [sys.executable, "-c", SCRIPT.format(body=body)]
    process = subprocess.Popen(command, env=PATH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("pass", 0, ""),
        ("open('no/file')", 2, "error: no/file: No such file or directory\n"),
        ("raise OSError('disk on fire')", 2, "error: disk on fire\n"),
        ("raise ConfigError('a = 1: too small')", 2, "error: a = 1: too small\n"),
        ("b'\\xff'.decode()", 2, "error: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte\n"),
    ],
)
def test_a_script_reports_errors_in_one_line(body, code, error):
    process = start_script(body)
    assert process.communicate(timeout=60)[1] == error
    assert process.returncode == code


@pytest.mark.parametrize(
    ("closed", "body", "code", "output"),
    [
        (">&-", "pass", 0, ""),
        ("2>&-", "raise ConfigError('wrong')", 2, "started\n"),
        ("<&-", "print(sys.stdin.read())", 0, "started\n\n"),
        ("</dev/null", "print('\\u00e9')", 0, "started\n\\xe9\n"),
    ],
)
def test_a_script_runs_without_a_stream_and_in_an_ascii_terminal(closed, body, code, output):
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", SCRIPT.format(body=body)]
    environment = PATH | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, "")


def test_ctrl_c_ends_a_script_without_a_traceback():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a job in the background ignore it
    process = start_script("time.sleep(60)")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("body", ["print('x' * 100_000, flush=True)", "time.sleep(0.5); print('buffered')"])
def test_a_script_whose_output_is_not_read_ends_without_a_traceback(body):
    process = start_script(body)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
    process.stderr.close()
