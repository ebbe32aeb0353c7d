"""What several tests share."""

import pytest

from tests.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Real text, prepared once for all tests."""
    return make_corpus(tmp_path_factory.mktemp("data") / "corpus")
