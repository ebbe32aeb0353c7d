"""Warnings at the start of a run: options that work, but probably not as intended."""

from collections.abc import Iterator

from torchtitan_clone.config import Config
from torchtitan_clone.torch_compat import has_bfloat16_units


def find_notices(config: Config, *, device_type: str) -> Iterator[str]:
    """Yields one sentence for each."""
    warmup = config.lr_scheduler.warmup_steps
    steps = config.lr_scheduler.total_steps or config.training.steps
    if warmup > steps and not config.lr_scheduler.points:
        yield (
            f"lr_scheduler.warmup_steps = {warmup}: the schedule has {steps} steps, so it is only a warmup, of {steps} "
            "steps; decrease it for a learning rate that decays"
        )
    if config.checkpoint.last_save_model_only and not config.checkpoint.enable:
        yield "checkpoint.last_save_model_only = true: nothing is saved with checkpoint.enable = false"
    if device_type == "cpu" and config.training.mixed_precision_param == "bfloat16" and not has_bfloat16_units():
        yield (
            'training.mixed_precision_param = "bfloat16": this processor has no bfloat16 units, so products '
            'are emulated, up to 100 times slower; set it to "float32", or to "auto"'
        )
