"""What several tests of parallelism share."""

import json
import sysconfig
from pathlib import Path

import pytest


def short_documents(folder: Path) -> Path:
    """Text in documents of five lines, so that most rows hold several, which attention must keep apart."""
    folder.mkdir(parents=True)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text().splitlines()
    pieces = ["\n".join(text[first : first + 5]) for first in range(0, len(text), 5)]
    (folder / "pieces.jsonl").write_text("\n".join(json.dumps({"text": piece}) for piece in pieces))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Instead of the corpus of the other tests, in which hardly a row holds two documents."""
    return short_documents(tmp_path_factory.mktemp("short") / "corpus")
