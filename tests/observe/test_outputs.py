"""Outputs that are closed, or whose disk is full."""

import os
import subprocess
import sys
from pathlib import Path

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
