"""Configuration of a run as plain data: schema, loading, validation. Of the package it imports only documents."""

from torchtitan_clone.config.messages import ConfigError
from torchtitan_clone.config.overlay import overlay
from torchtitan_clone.config.reader import load_config, load_run_config, read_config
from torchtitan_clone.config.render import changes_to_toml, help_text, to_toml
from torchtitan_clone.config.resolved import Degrees, resolved_degrees, resolved_global_batch_size, run_folder
from torchtitan_clone.config.schema import Config

__all__ = ["Config", "ConfigError", "Degrees", "changes_to_toml", "help_text", "load_config", "overlay"]
__all__ += ["load_run_config", "read_config", "resolved_degrees", "resolved_global_batch_size", "run_folder", "to_toml"]
