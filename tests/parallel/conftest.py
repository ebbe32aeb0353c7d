"""What several tests of parallelism share."""

import json
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Text in documents of five lines, so that most rows hold several, which attention must keep apart."""
    folder = tmp_path_factory.mktemp("short") / "corpus"
    folder.mkdir()
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text().splitlines()
    pieces = ["\n".join(text[first : first + 5]) for first in range(0, len(text), 5)]
    (folder / "pieces.jsonl").write_text("\n".join(json.dumps({"text": piece}) for piece in pieces))
    return folder
