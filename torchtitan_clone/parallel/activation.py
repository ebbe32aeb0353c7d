"""Activation checkpointing: recomputes in backward what would take much memory to keep.

Source: arXiv 1604.06174; selective, arXiv 2205.05198.
"""

from collections.abc import Set
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_clone.config.schema import ActivationCheckpoint
from torchtitan_clone.parallel import context as context  # defines the operator that is kept
from torchtitan_clone.torch_compat import checkpoint_wrapper


class KeptOperations(Protocol):
    """What selective checkpointing per operation keeps: results of `always`, and every second one of `alternating`."""

    @property
    def always(self) -> Set[object]: ...
    @property
    def alternating(self) -> Set[object]: ...


def apply_activation_checkpointing(
    layers: nn.ModuleDict, *, config: ActivationCheckpoint, kept: KeptOperations
) -> None:
    """Wraps the blocks that `config` selects, in place."""
    if config.mode == "none":
        return
    per_op = config.mode == "selective" and config.selective_ac_option == "op"
    every = 1 if config.mode == "full" or per_op else int(config.selective_ac_option)
    wrap = partial(checkpoint_wrapper, context_fn=partial(_selective_context, kept)) if per_op else checkpoint_wrapper
    for index, (name, block) in enumerate(list(layers.items())):
        if index % every == 0:
            layers[name] = wrap(block, preserve_rng_state=True)


def _selective_context(kept: KeptOperations):
    always = kept.always | {torch.ops.torchtitan_clone.context_attention.default}
    counts = {"forward": 0, "recompute": 0}

    def policy(ctx, op, *args, **kwargs):
        keep = op in always
        if op in kept.alternating:
            phase = "recompute" if ctx.is_recompute else "forward"
            counts[phase] += 1
            keep = counts[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
