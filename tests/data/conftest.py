"""Fixtures of the data tests."""

import pytest

from tests.data.corpora import TOKENIZER, open_corpus, write_corpus
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data import open_dataset


@pytest.fixture(scope="session")
def stdlib_cache(tmp_path_factory):
    """Returns a cache folder with the token store of the standard library."""
    folder = tmp_path_factory.mktemp("stdlib")
    open_dataset(training=Training(), data=Data(cache_folder=str(folder)), tokenizer=TOKENIZER)
    return folder


@pytest.fixture
def corpus(tmp_path):
    """Returns a corpus of 300 texts, changed by some tests."""
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory):
    """Returns a folder with a corpus of 60 texts in corpus/, and its token store in cache/."""
    folder = tmp_path_factory.mktemp("small_corpus")
    write_corpus(folder / "corpus", count=60)
    return folder


@pytest.fixture(scope="session")
def local_dataset(small_corpus):
    """Returns the dataset of the small corpus."""
    return open_corpus(small_corpus / "corpus", cache=small_corpus / "cache")
