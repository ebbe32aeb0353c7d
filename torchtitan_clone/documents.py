"""Reads what cannot be trusted: regular files of a bounded size, and JSON whose values are checked one by one.

`DocumentError` is the only error about content; a file that is missing or unreadable raises OSError as usual.
"""

import errno
import json
import os
import re
import stat
import sys
from io import FileIO
from pathlib import Path
from typing import NoReturn

MAX_BYTES = 1 << 26  # of a document, unless the caller knows better
MAX_INTEGER = 2**63 - 1
MAX_TEXT = 4096
MAX_NAME = 255
MAX_SHOWN = 60
MAX_DEPTH = 64
NESTED = (dict, list)  # as a tuple: "dict | list" would be made anew for every value of a document


class DocumentError(Exception):
    """A file or a value in it breaks a rule; the message names the file, the value and the rule."""


def open_regular(path: Path, *, follow_links: bool = False) -> FileIO:
    """Opens a regular file for reading, unbuffered, without blocking on a pipe or device; DocumentError for others."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DocumentError(f"{path.name}: must be a regular file, not a link") from None
        if error.errno == errno.ENXIO:  # a socket
            raise DocumentError(f"{path.name}: must be a regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DocumentError(f"{path.name}: must be a regular file")
        os.set_blocking(descriptor, True)
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES, follow_links: bool = False) -> bytes:
    """Returns the content of a regular file; DocumentError if it is no regular file or larger than `max_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        content = bytearray()
        while chunk := file.read(min(1 << 24, max_bytes + 1 - len(content))):
            content += chunk
        if len(content) > max_bytes:
            size = os.fstat(file.fileno()).st_size
            raise DocumentError(f"{path.name}: has {size:,} bytes; at most {max_bytes:,} are accepted")
    return bytes(content)


def find_member(folder: Path, *, name: str) -> Path | None:
    """Returns the regular file of that name in a folder of the Hugging Face hub; None if the folder has none.

    A link may lead to a file of the folder or, from a snapshot in the hub's cache, to one of its blobs:
    `snapshots/<revision>/<name> -> ../../blobs/<hash>`. DocumentError for other links and if it is no regular file.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    home = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(path))
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if path.is_symlink() and not is_blob and not target.is_relative_to(home):
        rule = "a link may lead only to a file of the same folder, or to a blob of its Hugging Face cache"
        raise DocumentError(f"{escape(name)}: {rule}; copy the file into the folder")
    if not target.is_file():
        raise DocumentError(f"{escape(name)}: must be a regular file")
    return target


def read_member(folder: Path, *, name: str, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Returns the content of a file that `find_member` finds, None if the folder has none; DocumentError as there."""
    path = find_member(folder, name=name)
    return None if path is None else read_regular(path, max_bytes=max_bytes)


def is_plain_name(name: str) -> bool:
    """Returns whether this is one printable component of a path: no separator, not "." or "..", not too long."""
    is_short = 0 < len(name.encode(errors="replace")) <= MAX_NAME
    return is_short and name.isprintable() and "/" not in name and name not in (".", "..")


def parse_json(content: bytes | str, *, where: str) -> "Value":
    """Parses one JSON document, named `where` in errors. DocumentError if it is not valid JSON."""
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise DocumentError(f"{where}: brackets are nested too deep; at most {MAX_DEPTH} levels are accepted") from None
    except ValueError as error:  # also a number of too many digits, and bytes that are not UTF-8
        raise DocumentError(f"{where}: not valid JSON: {escape(str(error))}") from None
    if _depth_exceeds(value, MAX_DEPTH):
        raise DocumentError(f"{where}: brackets are nested too deep; at most {MAX_DEPTH} levels are accepted")
    return Value(value, where=where)


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, follow_links: bool = False) -> "Value":
    """Reads and parses a document; DocumentError if it is no regular file, too large or not valid JSON."""
    return parse_json(read_regular(path, max_bytes=max_bytes, follow_links=follow_links), where=path.name)


def escape(text: str) -> str:
    """Returns the text on one line: control characters are escaped, so that it cannot forge a line of a log."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text: JSON and arguments of a program can contain halves of surrogate pairs."""
    return not re.search("[\ud800-\udfff]", text)


def shorten(text: str, *, max_chars: int = 3 * MAX_SHOWN) -> str:
    """Returns the escaped text, cut after `max_chars` characters: names from a file may be of any length."""
    escaped = escape(text[: max_chars + 1])
    return escaped if len(escaped) <= max_chars else f"{escaped[:max_chars]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _depth_exceeds(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            item
            for each in level
            if isinstance(each, NESTED)
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, NESTED)
        ]
        if not level:
            return False
    return True


class Value:
    """A value of a document and its place there; its methods return it as the type that the format requires."""

    def __init__(self, value: object, *, where: str):
        self.value = value
        self.where = where

    def refuse(self, rule: str) -> NoReturn:
        """Raises DocumentError with this place, value and rule."""
        raise DocumentError(f"{escape(self.where)} = {self._shown()}: {rule}")

    def table(self, *keys: str) -> "dict[str, Value]":
        """Returns the values of a table that has all of `keys` and no others."""
        entries = self.entries()
        if missing := [key for key in keys if key not in entries]:
            raise DocumentError(f"{escape(self.where)}: missing key {', '.join(missing)}")
        if unknown := [key for key in entries if key not in keys]:
            raise DocumentError(f"{escape(self.where)}: unknown key {escape(', '.join(unknown))[:MAX_SHOWN]}")
        return entries

    def entries(self) -> "dict[str, Value]":
        """Returns the values of a table with any keys."""
        entries = self.plain_entries()
        return {key: Value(item, where=f"{self.where}: {shorten(key)}"[-MAX_TEXT:]) for key, item in entries.items()}

    def plain_entries(self) -> dict[str, object]:
        """Returns a table with any keys whose values are not checked; for tables of a million values."""
        if not isinstance(self.value, dict):
            self.refuse("must be a table")
        return self.value

    def plain_items(self) -> list[object]:
        """Returns a list whose values are not checked."""
        if not isinstance(self.value, list):
            self.refuse("must be a list")
        return self.value

    def items(self, *, count: int | None = None) -> "list[Value]":
        """Returns the values of a list, of `count` items if given."""
        items = self.plain_items()
        if count is not None and len(items) != count:
            self.refuse(f"must be a list of {count} items")
        return [Value(item, where=f"{self.where}[{position}]") for position, item in enumerate(items)]

    def integer(self, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        """Returns an integer in [low, high]."""
        if type(self.value) is not int or not low <= self.value <= high:
            self.refuse(f"must be an integer from {low} to {high}")
        return self.value

    def integers(self, *, low: int = 0, high: int = MAX_INTEGER, count: int | None = None) -> list[int]:
        """Returns a list of integers in [low, high]."""
        if (
            isinstance(self.value, list)
            and count in (None, len(self.value))
            and all(type(each) is int and low <= each <= high for each in self.value)
        ):
            return self.value  # most lists are valid; a Value for each item takes ten times as long
        return [item.integer(low=low, high=high) for item in self.items(count=count)]

    def number(self, *, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> float:
        """Returns a finite number in [low, high]."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not low <= self.value <= high:
            self.refuse(f"must be a number from {low:g} to {high:g}")
        return float(self.value)

    def flag(self) -> bool:
        """Returns true or false."""
        if type(self.value) is not bool:
            self.refuse("must be true or false")
        return self.value

    def text(self, *, max_chars: int = MAX_TEXT, pattern: str = "(?s).*") -> str:
        """Returns a string of at most `max_chars` characters that matches all of a regular expression."""
        if not isinstance(self.value, str):
            self.refuse("must be a string")
        if len(self.value) > max_chars:
            self.refuse(f"must have at most {max_chars} characters")
        if not re.fullmatch(pattern, self.value):
            self.refuse(f"must match {pattern}")
        return self.value

    def choice(self, *choices: str) -> str:
        """Returns a string that is one of the choices."""
        if self.value not in choices:
            self.refuse(f"must be one of {', '.join(choices)}")
        return str(self.value)

    def file_name(self) -> str:
        """Returns the plain name of a file in the document's own folder."""
        if not is_plain_name(name := self.text()):
            self.refuse("must be the plain name of a file in the same folder")
        return name

    def _shown(self) -> str:
        if isinstance(self.value, dict | list):
            return "a table" if isinstance(self.value, dict) else "a list"
        text = escape(json.dumps(self.value, ensure_ascii=False))
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
