import os
import socket

import pytest

from torchtitan_clone.documents import DocumentError, Value, escape, is_plain_name, parse_json, read_json, read_regular


def test_files_that_are_not_regular_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name in ("pipe", "link", "device", "socket", "."):
        with pytest.raises(DocumentError, match="regular file"):
            read_regular(tmp_path / name)
    with pytest.raises(DocumentError, match="regular file"):
        read_regular(tmp_path / "device", follow_links=True)
    assert read_regular(tmp_path / "link", follow_links=True) == b"content"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent")


def test_size_limit(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1000))
    assert len(read_regular(tmp_path / "file", max_bytes=1000)) == 1000
    with pytest.raises(DocumentError, match="has 1,000 bytes; at most 999 are accepted"):
        read_regular(tmp_path / "file", max_bytes=999)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "nested too deep"),
        (b"[" * 100 + b"]" * 100, "nested too deep"),
        (b"9" * 5000, "not valid JSON"),
        (b"NaN", "NaN is not a JSON value"),
        (b"-Infinity", "Infinity is not a JSON value"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_invalid_json(tmp_path, content, message):
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(DocumentError, match=f"some.json: .*{message}"):
        read_json(tmp_path / "some.json")


@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        ("true", Value.integer, "d = true: must be an integer from 0 to"),
        ("1180591620717411303424", Value.integer, "must be an integer"),
        ("-1", Value.integer, "must be an integer from 0"),
        ("1.0", Value.integer, "must be an integer"),
        ("1e400", Value.number, "must be a number"),
        ("1" * 400, Value.number, "must be a number"),
        ("1", Value.flag, "must be true or false"),
        ("3", Value.text, "must be a string"),
        ('"' + "x" * 5000 + '"', Value.text, "at most 4096 characters"),
        ('"../a"', Value.file_name, "plain name"),
        ('"a\\nb"', Value.file_name, "plain name"),
        ("[]", Value.entries, "d = a list: must be a table"),
        ("{}", Value.items, "d = a table: must be a list"),
        ("{}", lambda value: value.table("a", "b"), "d: missing key a, b"),
        ('{"a": 1, "x\\n": 2}', lambda value: value.table("a"), r"d: unknown key x\\n"),
        ("[1, -1]", Value.integers, r"d\[1\] = -1"),
        ("[1]", lambda value: value.integers(count=2), "must be a list of 2 items"),
        ('{"a": {"b": "x"}}', lambda value: value.table("a")["a"].table("b")["b"].integer(), 'd: a: b = "x"'),
        ('"c"', lambda value: value.choice("a", "b"), "must be one of a, b"),
    ],
)
def test_values_of_another_type_or_range(text, read, message):
    with pytest.raises(DocumentError, match=message):
        read(parse_json(text, where="d"))


def test_valid_values():
    values = parse_json('{"a": [1, 2], "b": 1.5, "c": "x", "d": true}', where="d").table("a", "b", "c", "d")
    assert values["a"].integers() == [1, 2]
    assert values["b"].number() == 1.5
    assert (values["c"].text(), values["c"].file_name(), values["c"].choice("x")) == ("x", "x", "x")
    assert values["d"].flag() is True


def test_plain_names():
    assert all(is_plain_name(name) for name in ("a", "rank-0.safetensors", "ü b"))
    assert not any(is_plain_name(name) for name in ("", ".", "..", "a/b", "/a", "a\0", "a\n", "x" * 256, "\ud800"))


def test_escaped_text_is_one_line():
    assert escape("a\nb\x1b[31m\u2028ü") == "a\\nb\\x1b[31m\\u2028ü"
