"""Names of families and flavors."""

import re

import pytest

from torchtitan_clone.config import ConfigError, help_text
from torchtitan_clone.config.schema import Model
from torchtitan_clone.models import MODELS, find_model


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="known: llama3"):
        find_model(Model(name="llama5"))
    with pytest.raises(ConfigError, match="known: debugmodel, 1B"):
        MODELS["llama3"].resolve_args(Model(flavor="2B"))


def test_the_help_lists_all_families():
    (line,) = re.findall(r"Model family: (.*?)\.$", help_text("model"), re.MULTILINE | re.DOTALL)
    assert re.split(r",\s+|\s+or\s+", line) == list(MODELS)
