"""The corpus of the tests of parallelism."""

import pytest

from torchtitan_clone.testing.runs import make_short_documents


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Returns short documents, so that attention is masked; rows of the other corpus rarely hold two documents."""
    return make_short_documents(tmp_path_factory.mktemp("short") / "corpus")
