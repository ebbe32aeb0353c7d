"""Everything that describes a run, as plain data; the lowest room of the package."""

from torchtitan_clone.config.overlay import ConfigError, overlay
from torchtitan_clone.config.schema import Config

__all__ = ["Config", "ConfigError", "overlay"]
