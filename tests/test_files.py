"""Writing files and folders durably."""

import pytest

from torchtitan_clone.files import sync_folder, write_atomically


def test_writing_replaces_the_content_and_leaves_nothing_else(tmp_path):
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_keeps_the_old_content(tmp_path):
    write_atomically(tmp_path / "file", b"old")
    (tmp_path / "file.partial").mkdir()  # the temporary file cannot be created
    with pytest.raises(OSError, match="Is a directory"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_syncing_a_folder_that_does_not_exist_fails(tmp_path):
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
