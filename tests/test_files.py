"""Writing files and folders durably."""

import os

import pytest

from torchtitan_clone.files import sync_folder, write_atomically


def test_writing_replaces_the_content_and_leaves_nothing_else(tmp_path):
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_what_lies_at_the_temporary_name_is_replaced(tmp_path, kind):
    partial = tmp_path / "file.partial"
    (tmp_path / "other").write_bytes(b"other")
    {"pipe": lambda: os.mkfifo(partial), "link": lambda: partial.symlink_to("other"), "file": partial.touch}[kind]()
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "other").read_bytes() == b"other"
    assert not partial.exists()


def test_a_failed_write_keeps_the_old_content(tmp_path):
    write_atomically(tmp_path / "file", b"old")
    (tmp_path / "file.partial").mkdir()  # the temporary file cannot be created
    with pytest.raises(OSError, match="Is a directory"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "file" / "inside").mkdir(parents=True)  # a file cannot take the place of this folder
    with pytest.raises(OSError, match="Is a directory"):
        write_atomically(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_syncing_a_folder_that_does_not_exist_fails(tmp_path):
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
