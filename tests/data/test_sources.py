"""Documents are read from every file format; files that cannot be read are reported."""

import contextlib
import gzip
import json
import logging
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.corpora import jsonl, parquet, texts, write, zst
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data.sources import BLOCK_BYTES, BadRows, find_source, read_documents, stdlib_source

ROWS = texts(20)


def read(path, *, max_bad_rows: int = 0, text_key: str = "text") -> list[str]:
    """Returns all documents at a path."""
    source = find_source(Training(dataset_path=str(path), text_key=text_key))
    return [text for text, _ in read_documents(source, bad_rows=BadRows(limit=max_bad_rows))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", jsonl(ROWS)),
        ("a.jsonl", jsonl(ROWS).replace(b"\n", b"\r\n\n").rstrip()),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS))),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS[:7])) + gzip.compress(jsonl(ROWS[7:]))),
        ("a.jsonl.zst", zst(jsonl(ROWS))),
        ("A.JSONL", jsonl(ROWS)),
        ("en/c4-train.00000-of-01024.json.gz", gzip.compress(jsonl(ROWS))),
        ("a.json.zst", zst(jsonl(ROWS))),
        ("a.jsonl.zst", zst(jsonl(ROWS), frames=5)),
        ("a.parquet", parquet(ROWS)),
        ("a.parquet", parquet(ROWS, kind=pyarrow.large_string())),
        ("a.parquet", parquet(ROWS, kind=pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))),
    ],
)
def test_rows_are_documents(tmp_path, name, content):
    write(tmp_path, {name: content})
    assert read(tmp_path / name) == ROWS
    assert read(tmp_path) == ROWS


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    files = {"b.txt": "2", "a/z.py": "1", "c/d/e.md": "4", "b/.hidden": "x", ".git/f.txt": "x", "c.jsonl": jsonl(["3"])}
    assert read(write(tmp_path, files)) == ["1", "2", "3", "4"]


def test_folders_that_cannot_be_read_or_are_links_are_errors(tmp_path):
    """A path that is too long stands for a folder without permission, which root can read."""
    folder = write(tmp_path / "text", {"a.txt": "1", "b/c.txt": "2"})
    (folder / ".hidden").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder)
    with contextlib.chdir(folder):
        for _ in range(20):
            Path("d" * 250).mkdir()
            os.chdir("d" * 250)
    with pytest.raises(ConfigError) as error:
        read(folder)
    long, link = error.value.messages
    assert "cannot be read (File name too long); remove it" in long
    assert f"{folder / 'loop'} is a link to a folder, or cannot be read; replace it" in link
    ids = write(tmp_path / "ids", {"train.bin": b"1122"})
    (ids / "more").symlink_to(folder / "b")
    with pytest.raises(ConfigError, match="more is a link to a folder"):
        read(ids)


def test_empty_texts_are_not_documents(tmp_path):
    assert read(write(tmp_path, {"a.txt": "", "b.jsonl": jsonl(["", "x", ""]), "c.parquet": parquet([""])})) == ["x"]


def test_text_key_selects_the_text(tmp_path):
    assert read(write(tmp_path, {"a.jsonl": b'{"body": "x"}'}), text_key="body") == ["x"]


def test_a_long_text_is_split_at_line_ends(tmp_path):
    line = "zeile ä\n" * 1000
    text = line * (3 * BLOCK_BYTES // len(line.encode()))
    documents = read(write(tmp_path, {"a.txt": text}))
    assert "".join(documents) == text
    assert len(documents) == 3
    assert all(document.endswith("\n") for document in documents)


def test_a_line_longer_than_a_block_is_not_split(tmp_path):
    text = "ä" * BLOCK_BYTES + "\nrest"
    assert read(write(tmp_path, {"a.txt": text})) == ["ä" * BLOCK_BYTES + "\n", "rest"]


def test_a_binary_file_is_skipped_with_a_warning(tmp_path, caplog):
    text = "x" * 1000
    with caplog.at_level(logging.WARNING, logger="torchtitan_clone"):
        assert read(write(tmp_path, {"a.png": b"\x89PNG\0\xff", "b.txt": text})) == [text]
    assert caplog.messages == [f"left out of {tmp_path}: a.png (not text)"]


BAD_ROWS = [
    (b"{broken", "not JSON"),
    (b"[" * 100_000, "recursion"),
    (b'"text"', "not a JSON object but a string"),
    (b"17", "not a JSON object but a number"),
    (b'{"txt": "x", "n": 1}', "no key 'text' (training.text_key) among 'txt', 'n'"),
    (b'{"text": 3}', "holds a number"),
    (b'{"text": null}', "holds null"),
    (b'{"text": null, "links": [{"from": "a"}], "prompt": "b", "response": "c"}', "holds null"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (rb'{"text": "\ud800"}', "not valid Unicode"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_reported_with_its_line(tmp_path, row, reason):
    write(tmp_path, {"a.jsonl": jsonl(["x"]) + row + b"\n" + jsonl(["y"])})
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    assert f"{tmp_path / 'a.jsonl'}:2: " in str(error.value)
    assert reason in str(error.value)
    assert "data.max_bad_rows = 0" in str(error.value)
    assert read(tmp_path, max_bad_rows=1) == ["x", "y"]


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CHAT = 'set training.format = "chat" to train on the answers alone'
RENAME = f"rename it to 'messages', its keys to 'role' and 'content', and {CHAT}"
RENAME_BOTH = f"rename them to 'prompt' and 'completion', and {CHAT}"
PAIR = "are a prompt and its answer"
CONVERSATIONS = [
    ({"messages": TURNS}, f"'messages' is a chat; {CHAT}"),
    ({"id": 1, "conversations": [{"from": "human", "value": "Hi"}]}, f"'conversations' is a chat; {RENAME}"),
    ({"text": TURNS}, f"'text' is a chat; {RENAME}"),
    ({"instruction": "Add", "input": "1, 2", "output": "3"}, f"'instruction' and 'output' {PAIR}; {RENAME_BOTH}"),
    ({"prompt": "Add", "completion": "3"}, f"'completion' and 'prompt' {PAIR}; {CHAT}"),
    ({"question": "1 + 2?", "answer": "3"}, f"'answer' and 'question' {PAIR}; {RENAME_BOTH}"),
]


@pytest.mark.parametrize(("row", "reason"), CONVERSATIONS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_are_named_regardless_of_the_limit(tmp_path, row, reason, kind):
    if kind == "jsonl":
        write(tmp_path, {"a.jsonl": json.dumps(row) + "\n"})
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    with pytest.raises(ConfigError) as error:
        read(tmp_path, max_bad_rows=9)
    assert f"a.{kind}{':1' if kind == 'jsonl' else ''}: {reason}." in str(error.value)
    assert "max_bad_rows" not in str(error.value)


def test_a_text_beside_a_conversation_is_read(tmp_path):
    row = {"text": "x", "messages": TURNS, "prompt": "a", "completion": "b"}
    assert read(write(tmp_path, {"a.jsonl": json.dumps(row) + "\n"})) == ["x"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet")
    assert read(tmp_path) == ["x", "x"]


def test_bad_rows_of_all_files_are_counted_together(tmp_path):
    broken = b"\n".join(row for row, _ in BAD_ROWS)
    write(tmp_path, {"a.jsonl": broken, "b.txt": b"good\nb\xe4d", "c.parquet": parquet([None, "x"])})
    assert read(tmp_path, max_bad_rows=len(BAD_ROWS) + 2) == ["x"]
    with pytest.raises(ConfigError) as error:
        read(tmp_path, max_bad_rows=len(BAD_ROWS) + 1)
    assert f"{len(BAD_ROWS) + 2} unreadable row(s)" in str(error.value)
    assert f"and {len(BAD_ROWS) - 3} more" in str(error.value)  # five are shown


def test_text_that_is_not_utf8_is_reported_with_its_line(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.txt:3: not UTF-8"):
        read(write(tmp_path, {"a.txt": b"one\ntwo\nthr\xe9e"}))


def test_lines_are_counted_from_the_start_of_a_long_text(tmp_path):
    lines = BLOCK_BYTES // len(b"line\n") + 1000
    with pytest.raises(ConfigError, match=rf"a\.txt:{lines + 1}: not UTF-8"):
        read(write(tmp_path, {"a.txt": b"line\n" * lines + b"\xff"}))


def test_parquet_strings_that_are_not_utf8_are_bad_rows(tmp_path):
    binary = pyarrow.array([b"x", b"\xff", b"y"], type=pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, binary.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert read(tmp_path, max_bad_rows=1) == ["x", "y"]
    with pytest.raises(ConfigError, match=r"a\.parquet:2: not UTF-8"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_corrupt_files_are_errors_regardless_of_the_limit(tmp_path, kind, damage):
    rows = texts(3000)
    content = {"a.jsonl.gz": gzip.compress(jsonl(rows)), "a.jsonl.zst": zst(jsonl(rows)), "a.parquet": parquet(rows)}
    intact = content[kind]
    middle = len(intact) // 2
    broken = intact[:middle] if damage == "truncated" else intact[:middle] + bytes(200) + intact[middle + 200 :]
    with pytest.raises(ConfigError, match=rf"{kind}.* corrupt after .* replace "):
        read(write(tmp_path, {kind: broken}), max_bad_rows=10**6)


def test_a_missing_parquet_column_is_an_error_with_its_columns(tmp_path):
    with pytest.raises(ConfigError, match=r'text_key = "body": .*no such column; set it to one of n, text\.'):
        read(write(tmp_path, {"a.parquet": parquet(ROWS)}), text_key="body")
    with pytest.raises(
        ConfigError, match=r'text_key = "n": the column of .* holds int64, not strings; set it to another'
    ):
        read(tmp_path, text_key="n")


def test_a_parquet_column_whose_name_is_not_utf8_is_one_error(tmp_path):
    content = parquet(ROWS).replace(b"text", b"te\xfft")
    with pytest.raises(ConfigError, match=r"a\.parquet: the data is corrupt after row 0 .*utf-8.* replace the file"):
        read(write(tmp_path, {"a.parquet": content}))


def test_a_missing_or_unknown_source_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.dataset_path = .*missing\": no such file or folder"):
        find_source(Training(dataset_path=str(tmp_path / "missing")))
    command = r"`hf download org/name --repo-type dataset`\), or stream it"
    with pytest.raises(ConfigError, match=rf'{command} with training\.dataset = "org/name"'):
        find_source(Training(dataset_path="org/name"))
    (tmp_path / ".hidden.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"training\.dataset_path = .*no files to read in .* begin with a dot"):
        find_source(Training(dataset_path=str(tmp_path)))
    with pytest.raises(
        ConfigError, match=r'dataset = "stdlb": unknown dataset; set it to one of c4, stdlib or .*"org/name"'
    ):
        find_source(Training(dataset="stdlb"))


@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_a_file_of_json_is_not_trained_on_as_text(tmp_path, name):
    """Datasets of records often have this suffix; in a folder of source code such files are text."""
    write(tmp_path, {name: '{\n  "name": "package"\n}\n'})
    with pytest.raises(ConfigError, match=rf"{name}.*is JSON, of which brackets .* rename it to \.jsonl if each"):
        read(tmp_path / name)
    with pytest.raises(ConfigError, match="is JSON, of which brackets"):
        read(tmp_path)
    assert read(write(tmp_path, {"b.py": "x = 1"}))[-1] == "x = 1"


def test_the_standard_library_source_excludes_its_tests():
    source = find_source(Training())
    names = {file.relative_to(source.root).as_posix() for file in source.files}
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not [name for name in names if "/test" in name or name.startswith("test/") or "packages" in name]


def test_a_broken_link_of_the_standard_library_is_left_out(tmp_path, monkeypatch):
    """As Debian's sitecustomize.py in a container without its /etc/python3.11."""
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "missing.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert stdlib_source().files == (tmp_path / "a.py",)
