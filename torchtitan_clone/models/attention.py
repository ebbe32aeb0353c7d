"""Causal attention within documents: FlexAttention on CUDA, ops/blockwise_attention.py on CPU.

Legend: B batch, T tokens, D model, N heads, K kv heads, H head dim; in masks Q and K blocks of queries and keys.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtitan_clone.models.rope import Positions, apply_positions
from torchtitan_clone.ops.blockwise_attention import document_attention, visible_starts

AttentionMask = BlockMask | Tensor | None
BLOCK = 128
"""Number of queries and of keys in a block of FlexAttention; its kernels require this value."""


class DocumentMask(nn.Module):
    """Builds the mask for rows of documents; a module, so that context parallelism can replace it."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks_per_row = 1  # that hold the tokens of a row

    def forward(
        self, documents_BT: Tensor | None, positions_BT: Tensor, *, window: int | None = None, chunk: int | None = None
    ) -> AttentionMask:
        """Returns the first token that each one attends to [B, T] on CPU, a BlockMask on CUDA, None for causal only.

        `documents_BT` numbers the documents of complete rows; `positions_BT` are those of this rank's tokens.
        """
        shape = len(positions_BT), positions_BT.shape[1] * self.ranks_per_row
        starts_BT = visible_starts(documents_BT, like=positions_BT, shape=shape, window=window, chunk=chunk)
        return starts_BT if starts_BT is None or starts_BT.device.type == "cpu" else block_mask(starts_BT)


def block_mask(starts_BT: Tensor) -> BlockMask:
    """Returns FlexAttention's mask for tokens whose documents start at these indices of the row."""
    # Computed from the first and last token of each block of queries: create_block_mask would evaluate all T^2 pairs.
    T = starts_BT.shape[1]
    starts_BQ1 = starts_BT[:, ::BLOCK, None]
    last_BQ1 = F.pad(starts_BT, (0, -T % BLOCK), mode="replicate")[:, BLOCK - 1 :: BLOCK, None]
    index_Q = torch.arange(starts_BQ1.shape[1], dtype=torch.int32, device=starts_BT.device)
    seen_BQK = (index_Q >= starts_BQ1 // BLOCK) & (index_Q <= index_Q[:, None])
    full_BQK = (index_Q * BLOCK >= last_BQ1) & (index_Q < index_Q[:, None])

    def allowed(b: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= starts_BT[b, q])

    partial, full = _counts_and_indices(seen_BQK & ~full_BQK), _counts_and_indices(full_BQK)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(T, T))


def _counts_and_indices(is_in_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of selected blocks of keys [B, 1, Q], and all blocks, selected ones first [B, 1, Q, K]."""
    order = is_in_BQK.int().argsort(dim=-1, descending=True, stable=True)
    return is_in_BQK.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@cache
def _compiled_flex_attention():
    return torch.compile(flex_attention)  # uncompiled, it materializes the full score matrix


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(H)) v with grouped queries; a module, so that context parallelism can replace it."""

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


class Attention(nn.Module):
    """Grouped-query attention; `qk_norm_eps` adds an RMSNorm of q and k. Source: arXiv 2305.13245, arXiv 2302.05442."""

    def __init__(self, *, dim: int, n_heads: int, kv_heads: int, head_dim: int, qk_norm_eps: float | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm_eps is not None else None
        self.core = CoreAttention()

    def forward(self, x_BTD: Tensor, rope: Positions, mask: AttentionMask) -> Tensor:
        """Returns [B, T, D]; infers the number of heads, because tensor parallelism shards the projections' outputs."""
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTNH = self.q_norm(q_BTNH) if self.q_norm is not None else q_BTNH
        k_BTKH = self.k_norm(k_BTKH) if self.k_norm is not None else k_BTKH
        q_BTNH, k_BTKH = apply_positions(q_BTNH, k_BTKH, rope)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, mask)
        return self.wo(out_BTNH.flatten(-2))
