"""The object server that tests of checkpoints share."""

import pytest

from tests.support.object_server import served_process


@pytest.fixture(scope="module")
def server():
    """Returns a server that ranks use, and the tests themselves, which look into the store."""
    with served_process() as started:
        yield started
