"""What several tests of parallelism share."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch

from torchtitan_clone.run.preflight import SPLITS_BACKWARD_SINCE

SPLITS_BACKWARD = (
    "ZeroBubble",
    "zero bubble",
    "DualPipeV",
    "0F0,0F1,0I0",
    "loses_gradients",
    "goes_on_with_other_pipe",
)


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


@pytest.fixture(autouse=True)
def skip_what_this_torch_cannot(request):
    """Leaves out runs of schedules that split backward where they are refused; see preflight."""
    runs = "corpus" in request.fixturenames
    if runs and torch.__version__ < SPLITS_BACKWARD_SINCE and any(n in request.node.name for n in SPLITS_BACKWARD):
        pytest.skip(f"torch {torch.__version__} cannot split backward")
