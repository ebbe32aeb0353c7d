"""Libraries of C++ in the user's cache folder: shared, checked, and compiled by processes that end with the run."""

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_clone.cpu import library as cpp_library
from torchtitan_clone.cpu.library import (
    FLOATS_OF_VECTOR,
    TILE_FLAGS,
    VECTOR_FLAGS,
    is_loaded,
    leave_out,
    load_cpp,
    permits_tiles,
)
from torchtitan_clone.cpu.torch_compat import HAS_AMX
from torchtitan_clone.torch_compat import compiler_command

SECONDS_TO_END = 5
LOAD = """
import sys
from pathlib import Path
from torchtitan_clone.cpu.library import load_cpp
print(load_cpp([Path(path) for path in sys.argv[1:]], flags=["-O0"]).seven())
"""


class User:
    """A user with a compiler that writes each of its calls to a file, two sources, and caches in one folder."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.python = python
        self.script = folder / "load.py"
        self.script.write_text(LOAD)
        self.calls = folder / "calls"
        (folder / "tmp").mkdir()
        self.sources = [folder / "three.cpp", folder / "seven.cpp"]
        self.sources[0].write_text("int three() { return 3; }")
        self.sources[1].write_text('int three();\nextern "C" int seven() { return 4 + three(); }')
        self.compiler = folder / "g++"
        self.compile_with("")

    def compile_with(self, lines: str) -> None:
        """Lets the compiler execute these lines of a shell first."""
        log = f'[ "$1" = --version ] || echo "$@" >> {shlex.quote(str(self.calls))}'
        self.compiler.write_text(f'#!/bin/sh\n{log}\n{lines}\nexec {compiler_command()} "$@"\n')
        self.compiler.chmod(0o755)

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        """Starts a process that loads the library, and prints the result of its function."""
        # A process that was forked has decided for its processor, and cannot load a library before its own.
        python = sys.executable if {"ATEN_CPU_CAPABILITY", "LD_PRELOAD"} & {*environment} else self.python
        own = {"XDG_CACHE_HOME": self.folder / "cache", "TMPDIR": self.folder / "tmp", "CXX": self.compiler}
        return subprocess.Popen(
            [python, self.script, *self.sources],
            env={**os.environ, **{name: str(path) for name, path in own.items()}, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def load(self, **environment: str) -> str:
        """Returns what such a process prints, and how it ended if it failed."""
        process = self.start(**environment)
        text, _ = process.communicate()
        return f"{text.strip()}{process.returncode or ''}"

    def compiled(self) -> list[str]:
        """Returns what was compiled or linked since the last call."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return [Path(words[words.index("-c") + 1]).name if "-c" in words else "link" for words in map(str.split, lines)]

    def files(self, pattern: str) -> list[Path]:
        return [path for path in self.folder.rglob(pattern) if path.is_file()]


ALL = ["three.cpp", "seven.cpp", "link"]


@pytest.fixture
def user(tmp_path: Path, python: Path) -> User:
    return User(tmp_path, python)


def test_a_library_is_compiled_once_for_a_compiler_and_a_processor(user):
    assert (user.load(), user.compiled()) == ("7", ALL)
    assert (user.load(), user.compiled()) == ("7", [])
    assert (user.load(ATEN_CPU_CAPABILITY="default"), user.compiled()) == ("7", ALL)
    user.compile_with('[ "$1" = --version ] && echo another && exit')
    assert (user.load(), user.compiled()) == ("7", ALL)
    assert len(user.files("*.so")) == 3
    assert not user.files("*.o")


def test_without_a_home_that_can_be_written_a_library_is_kept_among_temporary_files(user):
    said = user.load(XDG_CACHE_HOME=str(user.compiler))
    assert "7" in said.splitlines()
    assert "set $XDG_CACHE_HOME to a folder that only you can write to" in said
    assert user.files(f"tmp/torchtitan_clone-{os.geteuid()}/cpp/*/*.so")
    assert user.compiled() == ALL
    user.load(XDG_CACHE_HOME=str(user.compiler))
    assert user.compiled() == []


def test_without_a_compiler_a_library_of_any_is_used(user):
    assert "not on $PATH; install g++" in user.load(CXX="no-such-compiler")
    assert user.load() == "7"
    assert user.load(CXX="no-such-compiler") == "7"


@pytest.mark.parametrize("damage", [lambda x: x[: len(x) // 2], lambda _: b"", lambda x: x[:5000] + b"?" + x[5001:]])
def test_a_damaged_library_is_compiled_again(user, damage: Callable[[bytes], bytes]):
    """Loading one that is truncated ends a process by SIGBUS."""
    assert (user.load(), user.compiled()) == ("7", ALL)
    (library,) = user.files("*.so")
    content = library.read_bytes()
    library.write_bytes(damage(content))
    assert (user.load(), user.compiled()) == ("7", ALL)
    assert library.read_bytes() == content


def test_processes_that_start_together_compile_once(user):
    user.compile_with("sleep 1")
    processes = [user.start() for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["7\n"] * 3
    assert user.compiled() == ALL


def test_processes_compile_together_where_nothing_can_be_locked(user):
    """As on Lustre without the option flock; each process links a library of its own, or takes that of another."""
    source, library = user.folder / "flock.c", user.folder / "flock.so"
    source.write_text("#include <errno.h>\nint flock(int file, int how) { errno = ENOSYS; return -1; }")
    subprocess.run([compiler_command(), "-x", "c", "-shared", "-fPIC", source, "-o", library], check=True)
    user.compile_with("sleep 1")
    processes = [user.start(LD_PRELOAD=str(library)) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["7\n"] * 3
    assert not user.files("*.partial")
    assert len(user.compiled()) > len(ALL)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to every folder")
def test_a_folder_that_cannot_be_written_is_used(user):
    assert user.load() == "7"
    folder = user.files("*.so")[0].parent
    folder.chmod(0o500)
    user.compiled()
    assert (user.load(), user.compiled()) == ("7", [])
    user.sources[0].write_text("int three() { return 4; }")  # of another version, which is not there
    try:
        assert user.load().splitlines()[-1] == "8"
        assert user.files("tmp/torchtitan_clone-*/cpp/*/*.so")
    finally:
        folder.chmod(0o700)


def test_a_folder_to_which_others_can_write_is_not_used(user):
    """Else its code would be executed: here that of a library which returns another number."""
    assert user.load() == "7"
    (library,) = user.files("*.so")
    source = user.sources[0].read_text()
    user.sources[0].write_text("int three() { return 666; }")
    assert user.load() == "670"
    (forged,) = {*user.files("*.so")} - {library}
    library.write_bytes(forged.read_bytes())
    user.sources[0].write_text(source)
    assert user.load() == "670"  # the attack works in a folder that is safe
    library.parent.chmod(0o777)
    said = user.load()
    assert said.splitlines()[-1] == "7"
    assert "other users can write to" in said


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition: Callable[[], object], *, seconds: float) -> bool:
    """Returns whether the condition becomes true."""
    end = time.monotonic() + seconds
    while not (found := bool(condition())) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_compiler_ends_with_the_process_that_started_it(user, number):
    """With all its processes and files; what it has compiled is not compiled again."""
    pids = user.folder / "pids"
    report = f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    user.compile_with(f'case "$*" in *-c*seven.cpp*) {report} ;; esac')
    process = user.start()
    assert wait_for(pids.exists, seconds=120)
    process.send_signal(number)
    process.wait()
    running = [int(pid) for pid in pids.read_text().split()]
    assert wait_for(lambda: not any(map(is_running, running)), seconds=SECONDS_TO_END), running
    assert wait_for(lambda: not any((user.folder / "tmp").iterdir()), seconds=SECONDS_TO_END)
    assert not user.files("*.partial")
    assert user.compiled() == ["three.cpp", "seven.cpp"]
    user.compile_with("")
    assert (user.load(), user.compiled()) == ("7", ["seven.cpp", "link"])
    assert not user.files("*.o")


def test_a_later_run_of_a_process_uses_what_the_one_before_left_out():
    if not is_loaded():
        pytest.skip("nothing could be compiled")
    try:
        leave_out({"cpp"})
        assert not is_loaded()
    finally:
        leave_out(set())
    assert is_loaded()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_tiles_are_used_only_where_linux_permits_it():
    source = Path(cpp_library.__file__).with_name("tile_attention.cpp")
    flags = ["-O1", *TILE_FLAGS, f"-DFLOATS_OF_VECTOR={FLOATS_OF_VECTOR}", *VECTOR_FLAGS.split(), "-fopenmp"]
    assert permits_tiles(load_cpp([source], flags=flags)) is HAS_AMX
