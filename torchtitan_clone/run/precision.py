"""Data type of forward and backward where the configuration leaves it open."""

from dataclasses import replace

from torchtitan_clone.config import Config
from torchtitan_clone.torch_compat import has_bfloat16_units


def resolved_precision(config: Config, *, device_type: str) -> Config:
    """Returns the configuration with training.mixed_precision_param resolved where it is "auto"."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return config
    is_fast = device_type != "cpu" or has_bfloat16_units()
    dtype = "bfloat16" if is_fast or training.dtype == "bfloat16" else "float32"
    return replace(config, training=replace(training, mixed_precision_param=dtype))
