"""The corpus of the tests of parallelism."""

import pytest

from torchtitan_clone.testing.runs import short_documents


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Short documents, so that attention is masked; rows of the corpus of other tests hold hardly ever two."""
    return short_documents(tmp_path_factory.mktemp("short") / "corpus")
