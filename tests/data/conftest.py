"""What the data tests share."""

import pytest

from tests.data.corpora import TOKENIZER
from torchtitan_clone.config.schema import Data, Training
from torchtitan_clone.data import open_dataset


@pytest.fixture(scope="session")
def stdlib_cache(tmp_path_factory):
    """A cache in which the standard library is prepared."""
    folder = tmp_path_factory.mktemp("stdlib")
    open_dataset(training=Training(), data=Data(cache_folder=str(folder)), tokenizer=TOKENIZER)
    return folder
