"""Fixtures that several tests share."""

import pytest

from torchtitan_clone.testing.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Returns a folder of real text."""
    return make_corpus(tmp_path_factory.mktemp("data") / "corpus")


LONG = (
    "test_readme.py",
    "launch",
    "run",
    "test_trainer.py",
    "fault_tolerance",
    "parallel",
    "checkpoint",
)
"""Files and folders that take longest, the longest first."""


def pytest_collection_modifyitems(items):
    """Runs long files first: workers run one file after another, and end together if the last ones are short."""
    items.sort(key=lambda item: next((place for place, name in enumerate(LONG) if name in item.path.parts), len(LONG)))
