"""Which allocator a process reports, in processes started with the variables of scripts/allocator.sh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SETUP = 'source scripts/allocator.sh; set_up_allocator; exec "$@"'
VARIABLES = {"ALLOCATOR", "LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
DESCRIBE = "from torchtitan_clone.observe.allocator import describe_allocator; print(describe_allocator())"
KEEPS = "allocator: malloc, keeping freed memory"


def describe(**environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(
        ["bash", "-c", SETUP, "bash", sys.executable, "-c", DESCRIBE],
        cwd=REPO,
        env={**inherited, "PYTHONPATH": str(REPO), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"ALLOCATOR": "default"}, "allocator: malloc with its defaults"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "allocator: malloc with its defaults"),
        ({"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}, KEEPS),
    ],
)
def test_what_the_user_sets_is_kept(environment, line):
    assert describe(**environment) == line


def test_an_allocator_is_set_up():
    line = describe()
    assert line in (f"{KEEPS} on huge pages", "allocator: tcmalloc"), line


def test_freed_memory_is_kept():
    """Counts the page faults of allocating and freeing 64 MB, the size of some logits, twenty times."""
    code = (
        "import ctypes, resource; libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(20):\n"
        "        block = ctypes.c_void_p(libc.malloc(1 << 26)); ctypes.memset(block, 1, 1 << 26); libc.free(block)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(); print(faults())"
    )
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    found = {}
    for allocator in ("", "default"):
        command = ["bash", "-c", SETUP, "bash", sys.executable, "-c", code]
        environment = {**inherited, "ALLOCATOR": allocator}
        found[allocator] = int(subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True,
                                              check=True).stdout)  # fmt: skip
    assert found[""] < 100 < found["default"]
