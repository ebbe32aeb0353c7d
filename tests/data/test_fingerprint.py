"""Tests of sources.py: a fingerprint depends on names and contents, not on the location of the files."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.data.corpora import open_corpus, write
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data.sources import find_source, source_fingerprint


def fingerprint(folder: Path, *, listing: Path) -> str:
    """Returns the fingerprint of the files in a folder."""
    return source_fingerprint(find_source(Training(dataset_path=str(folder))), listing=listing)


def test_the_fingerprint_does_not_depend_on_the_location(tmp_path, corpus):
    here = open_corpus(corpus, cache=tmp_path / "cache")
    there = open_corpus(Path(shutil.copytree(corpus, tmp_path / "elsewhere")), cache=tmp_path / "cache")
    assert there.identity == here.identity
    assert there.store.folder == here.store.folder


@pytest.mark.parametrize("change", ["content", "name", "more", "less"])
def test_a_changed_source_is_prepared_again(tmp_path, corpus, change):
    before = open_corpus(corpus, cache=tmp_path / "cache")
    if change == "content":
        write(corpus, {"d/one.txt": "another text"})
    elif change == "name":
        (corpus / "d/one.txt").rename(corpus / "d/three.txt")
    elif change == "more":
        write(corpus, {"e.txt": "more"})
    else:
        (corpus / "d/two.md").unlink()
    after = open_corpus(corpus, cache=tmp_path / "cache")
    assert after.identity.data != before.identity.data
    assert after.store.folder != before.store.folder


def test_only_files_whose_size_or_time_changed_are_read_again(tmp_path, corpus):
    listing = tmp_path / "files.json"
    before = fingerprint(corpus, listing=listing)
    file = corpus / "d/one.txt"
    status = file.stat()
    file.write_bytes(bytes(status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(corpus, listing=listing) == before
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert fingerprint(corpus, listing=listing) != before


def test_a_corrupt_listing_is_replaced(tmp_path, corpus):
    listing = tmp_path / "files.json"
    before = fingerprint(corpus, listing=listing)
    listing.write_text(listing.read_text()[:50])
    assert fingerprint(corpus, listing=listing) == before
    assert json.loads(listing.read_text())
