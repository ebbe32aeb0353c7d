"""Fixtures that several tests share, and the order in which files of tests run."""

import logging
from pathlib import Path

import pytest
import torch

from tests.support.harness import PRELOADED
from tests.support.runs import make_corpus, make_short_documents
from tests.support.warm_python import WarmPython
from torchtitan_clone import doors

torch.set_num_threads(1)  # threads of two workers on two cores would wait for one another, which doubles their time
# Each takes up to two seconds, in every rank that compiles, streams, has replica groups, or whose file imports it. They
# ask torch whether there is a GPU: ranks forked after that could not use one.
SLOW_IMPORTS = ["torch._inductor.compile_fx", "transformers.models.llama.modeling_llama", "datasets", "torchft"]
PRELOADED[:0] = [] if torch.cuda.is_available() else SLOW_IMPORTS

collect_ignore = [name for name in doors.DOORS if doors.why_closed(name)]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Checks that no test leaves the process with more threads, which would slow down all that follow."""
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def logging_as_before():
    """Undoes what programs that a test starts in this process do to logging: pytest would see no records."""
    logger = logging.getLogger("torchtitan_clone")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before
    logging.disable(logging.NOTSET)  # the launcher disables it


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Returns a folder of real text."""
    return make_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory):
    """Returns short documents, so that attention is masked; rows of the other corpus rarely hold two documents."""
    return make_short_documents(tmp_path_factory.mktemp("short") / "corpus")


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """Returns an interpreter that starts commands sooner."""
    with WarmPython(tmp_path_factory.mktemp("python") / "bin") as warm:
        yield warm.executable


LONG = (
    "test_readme.py",
    "launch",
    "run",
    "test_trainer.py",
    "torchft",
    "parallel",
    "checkpoint",
)
"""Files and folders of tests that take longest, the longest first."""


def pytest_collection_modifyitems(items):
    """Runs long files first: a worker runs complete files, so that workers finish together if the last are short."""
    items.sort(key=lambda item: rank_of_file(item.path.relative_to(Path(__file__).parent)))


def rank_of_file(path):
    """Returns the index in LONG of a file or of its folder; files that are not there come last."""
    return LONG.index(path.parts[0]) if path.parts[0] in LONG else len(LONG)
