"""Activation checkpointing: recompute in backward what would be costly to keep.

Source: arXiv 1604.06174; selective, arXiv 2205.05198.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_clone.config.schema import ActivationCheckpoint
from torchtitan_clone.ops.blockwise_attention import document_attention
from torchtitan_clone.parallel.context import context_attention

_aten = torch.ops.aten
# What selective checkpointing per operation keeps: results that cost much to compute for their size.
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    document_attention._opoverload,
    context_attention._opoverload,
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
