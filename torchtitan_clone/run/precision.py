"""Data types and sizes of a step that follow from the device where the configuration leaves them open."""

from dataclasses import replace

import torch

from torchtitan_clone.config import Config
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.torch_compat import has_bfloat16_units


def resolved_precision(config: Config, *, device_type: str) -> Config:
    """Returns the configuration with training.mixed_precision_param resolved where it is "auto"."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return config
    is_fast = device_type != "cpu" or has_bfloat16_units()
    dtype = "bfloat16" if is_fast or training.dtype == "bfloat16" else "float32"
    return replace(config, training=replace(training, mixed_precision_param=dtype))


_CHUNK_TOKENS = 1024
_GPU_LOGITS = 2**28
"""Bytes of a chunk's logits with which products on a GPU are as fast as with all."""


def loss_chunk_tokens(plan: RunPlan) -> int:
    """Returns the tokens of a chunk of the loss: training.loss_chunk_tokens, or what suits the device."""
    training = plan.config.training
    if training.loss_chunk_tokens != -1:
        return training.loss_chunk_tokens
    if plan.device_type == "cpu":
        return _CHUNK_TOKENS
    itemsize = getattr(torch, training.mixed_precision_param).itemsize
    fitting = _GPU_LOGITS // (itemsize * plan.model_args.vocab_size)
    return max(_CHUNK_TOKENS, 1 << max(0, fitting.bit_length() - 1))


def keeps_gradients(plan: RunPlan) -> bool:
    """Returns whether gradients stay in the data type of backward, which no replica group adds up."""
    return plan.device_type == "cuda" and plan.world_size == 1 and not plan.config.fault_tolerance.enable
