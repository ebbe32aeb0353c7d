"""The corpus of the tests of parallelism."""

import pytest


@pytest.fixture(scope="session")
def corpus(short_documents):
    """Returns documents of which most rows hold several."""
    return short_documents
