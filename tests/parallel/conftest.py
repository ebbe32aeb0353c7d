"""What several tests of parallelism share."""

import pytest
import torch

from torchtitan_clone.run.preflight import SPLITS_BACKWARD_SINCE
from torchtitan_clone.testing.runs import make_short_documents

SPLITS_BACKWARD = (
    "ZeroBubble",
    "zero bubble",
    "DualPipeV",
    "0F0,0F1,0I0",
    "loses_gradients",
    "goes_on_with_other_pipe",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Instead of the corpus of the other tests, in which hardly a row holds two documents."""
    return make_short_documents(tmp_path_factory.mktemp("short") / "corpus")


@pytest.fixture(autouse=True)
def skip_what_this_torch_cannot(request):
    """Leaves out runs of schedules that split backward where they are refused; see preflight."""
    runs = "corpus" in request.fixturenames
    if runs and torch.__version__ < SPLITS_BACKWARD_SINCE and any(n in request.node.name for n in SPLITS_BACKWARD):
        pytest.skip(f"torch {torch.__version__} cannot split backward")
