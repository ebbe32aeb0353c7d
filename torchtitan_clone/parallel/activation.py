"""Activation checkpointing: recompute in backward what would be costly to keep.

Source: arXiv 1604.06174; selective, arXiv 2205.05198.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_clone.config.schema import ActivationCheckpoint

# Each defines an operator that is kept.
from torchtitan_clone.ops import blockwise_attention as blockwise_attention
from torchtitan_clone.parallel import context as context
from torchtitan_clone.torch_compat import (
    checkpoint_wrapper,
    cpu_flash_attention,
    cudnn_attention,
    efficient_attention,
    flash_attention,
)

_aten = torch.ops.aten
# What selective checkpointing per operation keeps: results that cost much to compute for their size.
_KEPT = {
    flash_attention.default,
    efficient_attention.default,
    cudnn_attention.default,
    cpu_flash_attention.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.torchtitan_clone.document_attention.default,
    torch.ops.torchtitan_clone.context_attention.default,
}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.linear.default}


def apply_activation_checkpointing(layers: nn.ModuleDict, *, config: ActivationCheckpoint) -> None:
    """Wraps the blocks that `config` selects, in place."""
    every = 1 if config.mode == "full" or config.selective_ac_option == "op" else int(config.selective_ac_option)
    per_op = config.mode == "selective" and config.selective_ac_option == "op"
    wrap = partial(checkpoint_wrapper, context_fn=_selective_context) if per_op else checkpoint_wrapper
    for index, (name, block) in enumerate(list(layers.items())):
        if config.mode != "none" and index % every == 0:
            layers[name] = wrap(block, preserve_rng_state=True)


def _selective_context():
    products = {"forward": 0, "recompute": 0}

    def policy(ctx, op, *args, **kwargs):
        if op in _PRODUCTS:
            phase = "recompute" if ctx.is_recompute else "forward"
            products[phase] += 1
            # Every second product is recomputed: half the memory of the products for half their work.
            keep = products[phase] % 2 == 1
        else:
            keep = op in _KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
