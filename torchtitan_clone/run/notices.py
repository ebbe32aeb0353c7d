"""Warnings at the start of a run: options that work, but probably not as intended."""

from collections.abc import Iterator

from torchtitan_clone.config import Config
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.moe import MoEModelArgs
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


def find_model_notices(args: ModelArgs) -> Iterator[str]:
    """Yields one sentence for each argument of the model."""
    moe = args.moe if isinstance(args, MoEModelArgs) else None
    if moe is not None and moe.top_k == 1 and moe.normalize_scores and not moe.auxiliary:
        yield (
            "model.args.moe.top_k = 1: with normalize_scores = true the only score of a token is 1, and the router "
            "is not trained; set normalize_scores to false, a coefficient of an auxiliary loss, or top_k to 2"
        )
