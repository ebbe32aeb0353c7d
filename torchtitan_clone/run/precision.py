"""Data types and sizes of a step that follow from the device where the configuration leaves them open."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch

from torchtitan_clone.config import Config
from torchtitan_clone.ops.kernels import has_bfloat16_units
from torchtitan_clone.parallel.fsdp import requests_fsdp
from torchtitan_clone.run.plan import RunPlan


def resolved_precision(config: Config, *, device_type: str) -> Config:
    """Returns the configuration with training.mixed_precision_param resolved where it is "auto"."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return config
    is_fast = device_type != "cpu" or has_bfloat16_units()
    dtype = "bfloat16" if is_fast or training.dtype == "bfloat16" else "float32"
    return replace(config, training=replace(training, mixed_precision_param=dtype))


class _Chunks(NamedTuple):
    """The bytes of a chunk's logits with which products are about as fast as with all, and bounds of its tokens."""

    logits: int
    least: int
    most: int


_CHUNKS = {"cpu": _Chunks(logits=2**27, least=512, most=1024), "cuda": _Chunks(logits=2**28, least=1024, most=2**30)}


def loss_chunk_tokens(plan: RunPlan) -> int:
    """Returns the tokens of a chunk of the loss: training.loss_chunk_tokens, or what suits the device."""
    training = plan.config.training
    if training.loss_chunk_tokens != -1:
        return training.loss_chunk_tokens
    logits, least, most = _CHUNKS[plan.device_type]
    fitting = logits // (getattr(torch, training.mixed_precision_param).itemsize * plan.model_args.vocab_size)
    return min(max(least, 1 << max(0, fitting.bit_length() - 1)), most)


_GROUP_BYTES = 16 << 20
"""Bytes of weights of a group of blocks on a CPU, at most: of small ones, collectives cost more than their bytes do."""


def fsdp_blocks_per_group(plan: RunPlan) -> int:
    """Returns how many blocks FSDP shards together: parallelism.fsdp_blocks_per_group, or what suits the device."""
    parallelism, training = plan.config.parallelism, plan.config.training
    if parallelism.fsdp_blocks_per_group != -1:
        return parallelism.fsdp_blocks_per_group
    if plan.device_type != "cpu":
        return 1
    elements = Counter[str]()
    for name, parameter in plan.parameters.items():
        if name.startswith("layers."):
            elements[name.split(".")[1]] += parameter.numel()
    size = max(elements.values()) * getattr(torch, training.mixed_precision_param).itemsize
    return max(1, _GROUP_BYTES * plan.degrees.tp // size)


def keeps_gradients(plan: RunPlan) -> bool:
    """Returns whether gradients stay in the data type of backward, which no replica group adds up."""
    return is_without_fsdp(plan) and not plan.config.fault_tolerance.enable


def is_without_fsdp(plan: RunPlan) -> bool:
    """Returns whether a single rank trains without FSDP."""
    return plan.world_size == 1 and not requests_fsdp(plan.config.training, parallelism=plan.config.parallelism)
