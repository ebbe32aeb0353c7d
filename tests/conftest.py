"""What several tests share."""

import pytest

from torchtitan_clone.testing.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Real text, prepared once for all tests."""
    return make_corpus(tmp_path_factory.mktemp("data") / "corpus")


LONG = (
    "test_readme.py",
    "slurm",
    "test_preemption.py",
    "test_training.py",
    "fault_tolerance",
    "parallel",
    "checkpoint",
)
"""Files and folders, those of the longest files first."""


def pytest_collection_modifyitems(items):
    """Two workers take file after file, and end together if the last ones are short."""
    items.sort(key=lambda item: next((place for place, name in enumerate(LONG) if name in item.path.parts), len(LONG)))
