"""Activation checkpointing: recompute in backward what would be costly to keep.

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
    """What selective checkpointing per operation keeps, as the model's family says."""

    @property
    def always(self) -> Set[object]:
        """Operations whose results cost much to compute for their size."""
        ...

    @property
    def alternating(self) -> Set[object]:
        """Operations of which every second one is recomputed: half the memory for half the work."""
        ...


def apply_activation_checkpointing(
    layers: nn.ModuleDict, *, config: ActivationCheckpoint, kept: KeptOperations
) -> None:
    """Wraps the blocks that `config` selects, in place."""
    every = 1 if config.mode == "full" or config.selective_ac_option == "op" else int(config.selective_ac_option)
    per_op = config.mode == "selective" and config.selective_ac_option == "op"
    wrap = partial(checkpoint_wrapper, context_fn=partial(_selective_context, kept)) if per_op else checkpoint_wrapper
    for index, (name, block) in enumerate(list(layers.items())):
        if config.mode != "none" and index % every == 0:
            layers[name] = wrap(block, preserve_rng_state=True)


def _selective_context(kept: KeptOperations):
    always = kept.always | {torch.ops.torchtitan_clone.context_attention.default}
    products = {"forward": 0, "recompute": 0}

    def policy(ctx, op, *args, **kwargs):
        if op in kept.alternating:
            phase = "recompute" if ctx.is_recompute else "forward"
            products[phase] += 1
            keep = products[phase] % 2 == 1
        else:
            keep = op in always
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
