"""Folders that a stranger could have prepared, and what runs that read them do; for tests/campaigns/hostile_folders.py.

A `Target` is what is attacked: a clean folder, the kinds of damage to a copy of it, the command line of a run that
reads the copy, and the judgement of a run that ends well. A kind is a function (folder of the copy, random source) that
damages the copy and returns what it did, in a few words. To attack something else, write another target and enter it
in TARGETS of tests/campaigns/hostile_folders.py; `damage_file`, `damage_json` and HOSTILE_VALUES serve all targets.
"""

import json
import os
import random
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.support.harness import RankFailed, collect, start_ranks
from tests.support.runs import train_rank
from torchtitan_clone.cache_folders import user_cache_folder

REFUSED, FALLEN_BACK, HARMLESS = "refused", "fallen back", "harmless"
GOOD = (REFUSED, FALLEN_BACK, HARMLESS)
"""What a run may make of a hostile folder; everything else is a finding."""
ROOT = Path(__file__).resolve().parents[2]
SECRET = "secret"
"""File next to the copy, which no run may open; links and names of kinds may lead to it."""

Kind = Callable[[Path, random.Random], str]


class Target(Protocol):
    """What is attacked. Its constructor takes an empty folder, in which it may keep what runs only read."""

    clean: Path
    """Folder that is copied for each case."""
    kinds: Mapping[str, Kind]
    readable: tuple[Path, ...]
    """Files and folders outside the copy that a run may open, such as the corpus."""

    def argv(self, folder: Path) -> list[str]:
        """Returns the command line of a run that reads the copy."""
        ...

    def judge(self, folder: Path, output: str) -> str:
        """Returns FALLEN_BACK, HARMLESS or what is wrong with a run that exited with code 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hostile folder and what became of the run; `finding` is one of GOOD, or what is wrong."""

    number: int
    kind: str
    damage: str
    finding: str
    output: str

    @property
    def is_good(self) -> bool:
        return self.finding in GOOD


def run_case(target: Target, folder: Path, *, number: int, seed: int, timeout: float = 20) -> Case:
    """Damages a copy of the clean folder in the new `folder`, and starts a run on it in a fresh process.

    The kinds take turns, so that consecutive numbers cover all of them. `timeout` is in seconds.
    """
    kind = list(target.kinds)[number % len(target.kinds)]
    copy, log, reads = folder / "copy", folder / "log", folder / "reads"
    shutil.copytree(target.clean, copy)
    (folder / SECRET).write_text("{}")
    damage = target.kinds[kind](copy, random.Random(f"{seed} {number}"))
    readable = [str(path) for path in (copy, log, *target.readable)]
    started = start_ranks(train_guarded, 1, target.argv(copy), log, reads, readable)
    failure, code = "", None
    try:
        (code,) = collect(started, timeout=timeout)
    except RankFailed as error:
        failure = str(error)
    output = f"{log.read_text(errors='replace') if log.exists() else ''}{failure}"
    outside = reads.read_text() if reads.exists() else ""
    if "did not return" in failure:
        finding = "hang"
    elif failure or "Traceback" in output:
        finding = "traceback"
    elif outside:
        finding = f"opened {outside.splitlines()[0]}"
    elif code == 2 and output.count("error: ") == 1:
        finding = REFUSED
    else:
        finding = target.judge(copy, output) if code == 0 else f"exit code {code}"
    return Case(number=number, kind=kind, damage=damage, finding=finding, output=output)


def train_guarded(argv: list[str], log: Path, reads: Path, readable: list[str]) -> int:
    """Trains as one rank; writes what it opens outside the readable folders, installation and cache to `reads`."""
    installed = [str(ROOT), sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), "/usr", "/lib", "/proc", "/sys"]
    installed.append(str(user_cache_folder()))
    allowed = tuple(f"{os.path.realpath(path)}{os.sep}" for path in (*readable, *installed, "/dev/null", "/dev/shm"))
    found = os.open(reads, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, _, flags = arguments
            where = os.path.realpath(os.fsdecode(path), strict=False)
            if isinstance(flags, int) and flags & os.O_NOFOLLOW:  # a link at the end is not followed
                folder, name = os.path.split(os.fsdecode(path))
                where = os.path.join(os.path.realpath(folder), name)
            if not f"{where}{os.sep}".startswith(allowed):
                os.write(found, f"{where}\n".encode(errors="replace"))

    sys.addaudithook(watch)
    return train_rank(argv, [log])


# ------------------------------------------------------------------ damage that any target can use

HOSTILE_VALUES = (
    "null", "true", '"x"', '""', "-1", "0", "1.5", "[]", "{}", str(2**31), str(2**63), str(2**70), str(-(2**70)),
    "1e400", "-1e400", "NaN", "9" * 5000, "[" * 200_000, '{"a":' * 200_000, "[" * 90 + "]" * 90,
    f'"{"x" * 1_000_000}"', '"../../secret"', '"../secret"', '"/etc/passwd"', '"/dev/zero"', '"."', '".."',
    '"a\\u0000b"', '"a\\n\\u001b[31mb"',
    '"\\ud800"', '[[[[]]]]', "[1, [2, [3]]]", '{"__class__": "os.system"}', "nul", '"open',
)  # fmt: skip
"""Texts that take the place of a value in JSON; some are not JSON."""
_MARK = "hostile-value-goes-here"


def damage_json(path: Path, source: random.Random) -> str:
    """Changes one value of a JSON document, anywhere in it; returns what was done."""
    document = json.loads(path.read_bytes())
    places = list(_places(document))
    if not places:
        path.write_text(source.choice(HOSTILE_VALUES))
        return f"{path.name}: replaced"
    container, key = source.choice(places)
    where = f"{path.name}: {key}"[:60]
    action = source.choice(("replace", "replace", "replace", "delete", "insert", "swap"))
    text = source.choice(HOSTILE_VALUES)
    if action == "delete":
        del container[key]
    elif action == "swap" and len(container) > 1:
        swap(container, container, key, source.choice([each for each, _ in _items(container) if each != key]))
    elif action == "insert" and isinstance(container, dict):
        container[_MARK] = container[key]
    elif action == "insert":
        container.insert(key, container[key])
    else:
        action = f"becomes {text[:40]}"
        container[key] = _MARK
    path.write_text(json.dumps(document).replace(f'"{_MARK}"', text, 1))
    return f"{where} {action}"


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (container, key) of a document."""
    if isinstance(document, dict | list):
        for key, value in _items(document):
            yield document, key
            yield from _places(value)


def damage_file(path: Path, source: random.Random) -> str:
    """Replaces a file by something else, or changes its bytes; returns what was done."""
    content = path.read_bytes()
    kinds: dict[str, Callable[[], object]] = {
        "a pipe": lambda: os.mkfifo(path),
        "a socket": lambda: _bind(path),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to nothing": lambda: path.symlink_to("nothing"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to an equal file outside": lambda: _link_outside(path, content),
        "a folder": path.mkdir,
        "missing": lambda: None,
        "empty": lambda: path.write_bytes(b""),
        "half": lambda: path.write_bytes(content[: len(content) // 2]),
        "longer": lambda: path.write_bytes(content + b"\0" * source.randint(1, 5000)),
        "random bytes": lambda: path.write_bytes(source.randbytes(len(content))),
        "a terabyte of zeros": lambda: os.truncate(_written(path, content), 1 << 40),
        "with a changed bit": lambda: path.write_bytes(_flip(content, source)),
    }
    name = source.choice(list(kinds))
    path.unlink()
    kinds[name]()
    return f"{path.name} is {name}"


def swap(one: Any, two: Any, key: Any, other: Any = None) -> None:
    """Exchanges a value of two tables or lists."""
    other = key if other is None else other
    one[key], two[other] = two[other], one[key]


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the header of a file of safetensors, and the bytes after it."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def write_header(path: Path, header: object, data: bytes, *, length: int | None = None) -> None:
    """Writes a file of safetensors, of which the header may be JSON or raw text, and state another length."""
    text = (
        header if isinstance(header, bytes) else str.encode(header if isinstance(header, str) else json.dumps(header))
    )
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def damage_length(path: Path, source: random.Random) -> str:
    """Lets a file of safetensors state another length of its header; returns what was done."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    length = source.choice((0, 1, size - 8, size - 1, size + 8, 2**31, 2**63, 2**64 - 1))
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    return f"the length of the header becomes {length}"


def garble_random_state(path: Path, garbage: Callable[[int], bytes]) -> None:
    """Replaces the state of the random number generator of the CPU in a rank's file."""
    header, data = read_header(path)
    begin, end = header["rng/cpu/0"]["data_offsets"]
    content = path.read_bytes()
    start = len(content) - len(data)
    path.write_bytes(content[: start + begin] + garbage(end - begin) + content[start + end :])


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.getcwd()
        os.chdir(path.parent)  # the name of a socket has at most 107 bytes
        try:
            server.bind(path.name)
        finally:
            os.chdir(folder)


def _link_outside(path: Path, content: bytes) -> None:
    outside = next(parent for parent in path.parents if (parent / SECRET).exists()) / SECRET
    outside.write_bytes(content)
    path.symlink_to(outside)


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _flip(content: bytes, source: random.Random) -> bytes:
    if not content:
        return b"\0"
    place = source.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << source.randrange(8)]) + content[place + 1 :]
