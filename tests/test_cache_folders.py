"""Folders of compiled code: what strangers prepared is not executed, and each user finds one that works."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from torchtitan_clone.cache_folders import (
    code_folders,
    find_fault,
    is_intact,
    use_folder,
    user_cache_folder,
    write_with_digest,
)

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the user a home and a folder of temporary files, whose names are found again in every call."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def usual(home: Path) -> Path:
    return home / "torchtitan_clone" / "code"


def temporary(home: Path) -> Path:
    return home.parent / "tmp" / f"torchtitan_clone-{os.geteuid()}"


def test_only_the_user_can_enter_a_folder_of_code(home: Path) -> None:
    old = os.umask(0)
    try:
        assert code_folders("code") == [usual(home)]
    finally:
        os.umask(old)
    assert usual(home).stat().st_mode & 0o777 == 0o700
    assert find_fault(usual(home)) == ""


def share(folder: Path) -> None:
    folder.chmod(0o777)


def share_parent(folder: Path) -> None:
    folder.parent.chmod(0o777)


def share_content(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "inner").mkdir()
    (folder / "inner" / "library.so").touch()
    (folder / "inner" / "library.so").chmod(0o666)


def give_away(folder: Path) -> None:
    os.chown(folder, STRANGER, -1)


def give_parent_away(folder: Path) -> None:
    os.chown(folder.parent, STRANGER, -1)


def link_to_shared(folder: Path) -> None:
    folder.rmdir()
    other = folder.with_name("other")
    other.mkdir()
    other.chmod(0o777)
    folder.symlink_to(other)


def link_to_itself(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(folder)


ATTACKS: list[Any] = [
    (share, "other users can write to"),
    (share_parent, "other users can write to"),
    (share_content, "other users can write to"),
    (link_to_shared, "other users can write to"),
    (link_to_itself, ""),
    pytest.param(give_away, f"belongs to user {STRANGER}", marks=needs_root),
    pytest.param(give_parent_away, f"belongs to user {STRANGER}", marks=needs_root),
]


@pytest.mark.parametrize(("attack", "reason"), ATTACKS)
def test_a_folder_to_which_others_can_write_is_not_used(home: Path, caplog, attack, reason) -> None:
    (folder,) = code_folders("code")
    attack(folder)
    assert code_folders("code") == [temporary(home) / "code"]
    assert reason in caplog.text
    assert "set $XDG_CACHE_HOME to a folder that only you can write to" in caplog.text
    elsewhere = home / "mine"
    assert code_folders("code", chosen=str(elsewhere)) == [elsewhere]
    attack(elsewhere)
    assert elsewhere not in code_folders("code", chosen=str(elsewhere))


@pytest.mark.parametrize("attack", [share, link_to_shared, pytest.param(give_away, marks=needs_root)])
def test_a_temporary_folder_that_others_made_is_not_used(home: Path, attack) -> None:
    """Its name is known; and link_to_shared is to a folder in which others can put what they like."""
    usual(home).mkdir(parents=True)
    share(usual(home))
    (folder,) = code_folders("code")
    assert folder.parent == temporary(home)
    folder.rmdir()
    attack(temporary(home))
    (found,) = code_folders("code")
    assert found.parent != temporary(home).resolve()
    assert found.parent.parent == home.parent / "tmp"
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert code_folders("code") == [found]


def test_a_parent_in_which_only_owners_rename_is_safe(home: Path) -> None:
    home.parent.chmod(0o1777)
    assert code_folders("code") == [usual(home)]


NOEXEC = """
import sys
import tempfile
from torchtitan_clone.cache_folders import NoCodeFolderError, code_folders
try:
    print(*code_folders("code", chosen=sys.argv[1]))
except NoCodeFolderError as error:
    print(error)
"""


@needs_root
def test_a_file_system_without_execution_is_named(home: Path) -> None:
    """Temporary files are elsewhere first, and then there too."""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o noexec none "$0" && exec "$@"', str(home)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted")
    said = []
    for temporary_files in (home.parent / "tmp", home):
        command = [*mount, sys.executable, "-c", NOEXEC, str(home / "code")]
        environment = {**os.environ, "TMPDIR": str(temporary_files)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        said.append(done.stdout + done.stderr)
    assert str(temporary(home) / "code") in said[0]
    assert all("/home/code is on a file system that is mounted noexec" in text for text in said)
    assert said[1].endswith("that only you can write to, on a file system that is not mounted noexec\n")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/y"}, "/x"),
        ({"HOME": "/y"}, "/y/.cache"),
        ({"XDG_CACHE_HOME": "", "HOME": "/y"}, "/y/.cache"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/y"}, "/y/.cache"),
        ({"HOME": "relative"}, None),
    ],
)
def test_the_cache_folder_of_every_user(home, monkeypatch, environment, expected) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert user_cache_folder() == (temporary(home) if expected is None else Path(expected, "torchtitan_clone"))


WITHOUT_NAME = """
import os, sys
sys.path[:0] = {path!r}
from torchtitan_clone.cache_folders import code_folders, user_cache_folder
os.setresuid({user}, {user}, {user})
print(user_cache_folder(), *code_folders("code"))
"""


@needs_root
def test_a_user_without_a_name_and_a_home_has_folders(tmp_path: Path) -> None:
    code = WITHOUT_NAME.format(path=[str(Path(__file__).parents[1])], user=STRANGER)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # above tmp_path are folders of root
        Path(temporary).chmod(0o1777)
        environment = {"TMPDIR": temporary, "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        folder = Path(temporary, f"torchtitan_clone-{STRANGER}")
        assert done.stdout.split() == [str(folder), f"{folder}/code"], done.stderr


IN_NAMESPACE = """
import ctypes, os, sys
sys.path[:0] = {path!r}
from torchtitan_clone.cache_folders import code_folders
PR_SET_DUMPABLE, CLONE_NEWUSER = 4, 0x10000000
os.setresuid({user}, {user}, {user})
c = ctypes.CDLL(None)
c.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the map is not this user's
if c.unshare(CLONE_NEWUSER):
    sys.exit("no namespace")
with open("/proc/self/uid_map", "w") as file:
    file.write("{user} {user} 1")
print(*code_folders("code", chosen=sys.argv[1]))
"""


@needs_root
def test_a_namespace_in_which_root_looks_like_a_stranger_trusts_neither(tmp_path: Path) -> None:
    """A folder that a stranger has made there has the same owner as the root folder."""
    code = IN_NAMESPACE.format(path=[str(Path(__file__).parents[1])], user=STRANGER + 1)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        Path(temporary).chmod(0o1777)
        planted = [Path(temporary, name) for name in ("chosen", f"torchtitan_clone-{STRANGER + 1}")]
        for folder in planted:
            folder.mkdir()
            os.chown(folder, STRANGER, -1)
        command = [sys.executable, "-c", code, str(planted[0])]
        environment = {"TMPDIR": temporary, "PATH": os.environ["PATH"]}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if "no namespace" in done.stderr:
            pytest.skip("the kernel permits no user namespaces")
        (found,) = map(Path, done.stdout.split())
        assert found.parent.parent == Path(temporary), done.stderr
        assert found.parent not in planted


def test_files_that_other_processes_rename_are_no_fault(home: Path) -> None:
    (folder,) = code_folders("code", chosen=str(home / "mine"))
    folder.chmod(0o755)
    for number in range(100):
        (folder / str(number)).touch()
    code = "import os, sys\nwhile True:\n open('x', 'w').close()\n os.rename('x', 'y')\n os.remove('y')"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    try:
        assert {find_fault(folder) for _ in range(300)} == {""}
    finally:
        other.kill()
        other.wait()


def test_damaged_content_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    assert not is_intact(path)
    write_with_digest(path, b"content")
    complete = path.read_bytes()
    assert is_intact(path)
    for damaged in (b"", complete[:-1], complete[1:], complete.replace(b"t", b"T", 1), complete[:7]):
        path.write_bytes(damaged)
        assert not is_intact(path)


USE = """
import sys, time
from pathlib import Path
from torchtitan_clone.cache_folders import use_folder
use_folder(Path(sys.argv[1]))
print("in use", flush=True)
time.sleep(600)
"""


def descriptor_of(pid: int, name: str) -> str:
    folder = Path(f"/proc/{pid}/fd")
    return next(path.name for path in folder.iterdir() if path.readlink().name == name)


def test_what_a_crash_left_is_removed_if_nobody_uses_the_folder(tmp_path: Path) -> None:
    header = b"\x7fELF\x02" + bytes(35) + (64).to_bytes(8, "little") + bytes(10) + b"\x40\x00\x02\x00" + bytes(2)
    contents = {
        "whole.so": header + bytes(128), "short.so": header + bytes(127), "cut.o": header[:40], "empty.so": b"",
        "a.lock": b"", "text.py": b"x = 1", "empty.py": b"", "new.so.partial": b"x", ".1.2.tmp": b"x",
    }  # fmt: skip
    inner = tmp_path / "inner"
    inner.mkdir()

    def write() -> None:
        for name, content in contents.items():
            (inner / name).write_bytes(content)

    write()
    other = subprocess.Popen([sys.executable, "-c", USE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline() == "in use\n"
    flags = int(Path(f"/proc/{other.pid}/fdinfo/{descriptor_of(other.pid, 'in_use.lock')}").read_text().split()[3], 8)
    assert flags & os.O_ACCMODE == os.O_RDWR  # NFS refuses a shared lock of what cannot be read
    left = {"whole.so", "a.lock", "text.py"}
    assert {path.name for path in inner.iterdir()} == left
    write()
    use_folder(tmp_path)
    assert {path.name for path in inner.iterdir()} == contents.keys()  # the other might be writing them
    other.kill()
    other.wait()
    code = USE.replace("time.sleep(600)", "")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    assert {path.name for path in inner.iterdir()} == contents.keys()  # this process still uses it
