"""Warnings at the start of a run: options that work, but probably not as intended."""

from collections.abc import Iterator

from torchtitan_clone.config import Config
from torchtitan_clone.config.names import describe_group
from torchtitan_clone.models.decoder import ModelArgs
from torchtitan_clone.models.moe import MoEModelArgs
from torchtitan_clone.ops.kernels import has_bfloat16_units
from torchtitan_clone.run.plan import RunPlan

ADAM_LR = (1e-7, 0.1)
"""Peak learning rates between which Adam trains; published runs are between 1e-5 and 1e-2."""
LARGEST_DECAY = 0.01
LARGEST_BATCH = 10**8
"""In tokens; the largest published batch is DeepSeek V3's, of 63 million."""


def find_all_notices(plan: RunPlan, *, device_type: str) -> Iterator[str]:
    """Yields one sentence for each, at a start and in a dry run."""
    yield from find_notices(plan.config, device_type=device_type)
    yield from find_model_notices(plan.model_args)
    yield from find_value_notices(plan.config, tokens_per_step=plan.at_step(1).tokens_per_step)


def find_value_notices(config: Config, *, tokens_per_step: int) -> Iterator[str]:
    """Yields one sentence for each value that no published run is near."""
    optimizer = config.optimizer
    rates = {"optimizer.lr": optimizer.lr}
    rates |= {f"{describe_group(group)}: lr": group.lr for group in optimizer.groups if group.lr is not None}
    for option, lr in rates.items():
        if not ADAM_LR[0] <= lr <= ADAM_LR[1]:
            rule = "Adam changes a weight by about the learning rate in a step, and language models are trained with"
            yield f"{option} = {lr:g}: {rule} 1e-5 to 1e-2"
    if (share := optimizer.lr * optimizer.weight_decay) > LARGEST_DECAY and optimizer.lr <= ADAM_LR[1]:
        rule = f"with optimizer.lr = {optimizer.lr:g} each step takes {min(1.0, share):.0%} of every weight"
        yield f"optimizer.weight_decay = {optimizer.weight_decay:g}: {rule}; 0.1 is usual"
    if tokens_per_step > LARGEST_BATCH:
        rule = f"a step has {tokens_per_step:,} tokens, and the largest published batches 63 million"
        yield f"training.local_batch_size = {config.training.local_batch_size}: {rule}; decrease the batch"


def find_notices(config: Config, *, device_type: str) -> Iterator[str]:
    """Yields one sentence for each option that does less than it says."""
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
