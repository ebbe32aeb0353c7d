"""Causal attention that stays within documents.

The mask is built once for a batch and shared by all layers. What it is depends on the device: CPU has no backward for
FlexAttention, so attention there runs in blocks of its own. Neither is of size T^2.

Legend: B batch, T tokens, N heads, K kv heads, H head dim.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torchtitan_clone.blockwise import document_attention, document_starts

AttentionMask = BlockMask | Tensor | None


class DocumentMask(nn.Module):
    """Builds the mask for rows of documents; a module, so that another can take its place."""

    def forward(self, documents_BT: Tensor | None) -> AttentionMask:
        """On CPU where each token's document starts [B, T], on CUDA a BlockMask; None: causal and nothing more."""
        if documents_BT is None:
            return None
        B, T = documents_BT.shape
        if documents_BT.device.type == "cpu":
            return document_starts(documents_BT)

        def allowed(b: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (documents_BT[b, q] == documents_BT[b, kv])

        return create_block_mask(allowed, B=B, H=None, Q_LEN=T, KV_LEN=T, device=documents_BT.device)


@cache
def _compiled_flex_attention():
    # Uncompiled, FlexAttention materializes the whole score matrix; so it is compiled even where the model is not.
    return torch.compile(flex_attention)


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(H)) v with grouped queries; a module of its own, so that another can take its place."""

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask) -> Tensor:
        """Returns [B, T, N, H]."""
        if isinstance(mask, Tensor):
            return document_attention(q_BTNH, k_BTKH, v_BTKH, mask)[0]
        q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        grouped = q_BNTH.shape[1] != k_BKTH.shape[1]
        if isinstance(mask, BlockMask):
            flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
            out_BNTH = flex(q_BNTH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped)
        else:
            out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=grouped)
        return out_BNTH.transpose(1, 2)
