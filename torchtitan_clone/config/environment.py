"""Numbers in environment variables, as torchrun and run_train.sh set them."""

import os
import re

from torchtitan_clone.config.overlay import ConfigError, shown

MAX_WORLD_SIZE = 2**17


class EnvironmentVariableError(ConfigError):
    """An environment variable has an invalid value, so that the process cannot know its place among the others."""


def environment_integer(name: str, *, default: int, low: int = 0, high: int = MAX_WORLD_SIZE) -> int:
    """Returns the integer in an environment variable, `default` without it; an error if it is not in [low, high]."""
    text = os.environ.get(name, str(default))
    if re.fullmatch(r"[0-9]{1,18}", text) and low <= int(text) <= high:
        return int(text)
    raise EnvironmentVariableError(
        f"${name} = {shown(text)}: must be an integer from {low:,} to {high:,}; unset it, or start with run_train.sh"
    )
