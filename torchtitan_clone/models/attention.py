"""Causal attention within documents; ops/attention.py chooses who computes it.

Legend: B batch, T tokens, D model, N heads, K kv heads, H head dim.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.models.rope import Positions, apply_positions
from torchtitan_clone.ops.attention import (
    AttentionMask,
    AttentionModule,
    OnHost,
    document_starts,
    mask_device,
    mask_from,
    moved,
    visible_starts,
)
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.layers import Linear, RMSNorm, RMSNormOfHeads
from torchtitan_clone.ops.weight_use import MATRIX, WeightUses


class DocumentMask(nn.Module):
    """Builds the mask for rows of documents; a module, so that context parallelism can replace it."""

    def forward(
        self, documents_BT: OnHost | Tensor | None, positions_BT: Tensor, *, window: int | None = None,
        chunk: int | None = None, recurrent: bool = False, dtype: torch.dtype = torch.float32,
    ) -> AttentionMask:  # fmt: skip
        """Returns the first token that each one attends to [B, T] for the CPU and for FlashAttention, on the CPU.

        Returns a BlockMask for FlexAttention, None for causal only. Of the positions of the rows' tokens only shape
        and device matter; `dtype` is that of queries. For `recurrent` layers: first tokens of documents, on the device.
        """
        if recurrent:
            return None if documents_BT is None else document_starts(moved(documents_BT, positions_BT.device))
        device = mask_device(positions_BT.device, dtype=dtype, window=window)
        documents_BT = None if documents_BT is None else moved(documents_BT, device)
        like_BT = torch.empty(positions_BT.shape, device=device)
        starts_BT = visible_starts(documents_BT, like=like_BT, window=window, chunk=chunk)
        return None if starts_BT is None else mask_from(starts_BT)


class CoreAttention(AttentionModule):
    """softmax(q k^T / sqrt(H)) v with grouped queries; a module, so that context parallelism can replace it."""

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: AttentionMask, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Returns [B, T, N, H]; a sink is a logit of a head that is in the softmax, with a value of zero."""
        if mask is None and sinks_N is not None:
            mask = mask_from(torch.zeros(q_BTNH.shape[:2], dtype=torch.int32, device=q_BTNH.device))
        kernel = self.choose(q_BTNH, mask, has_sinks=sinks_N is not None)
        return kernel.attend(q_BTNH, k_BTKH, v_BTKH, mask, sinks_N)


class Sinks(nn.Module):
    """The sinks [N] of the heads; a module, so that tensor parallelism can shard it."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_heads))

    def forward(self) -> Tensor:
        return local_with_partial_grad(self.weight)


class Attention(nn.Module):
    """Grouped-query attention. Source: arXiv 2305.13245, arXiv 2302.05442.

    `qk_norm_eps` adds an RMSNorm of q and k, of each head, or with `norm_all_heads` of all heads together; `bias` adds
    one to q, k and v, `output_bias` to the result, `sinks` one logit to each head, `rotated_norm_eps` a norm without
    weight of rotated q and k. `score_scale` multiplies the scores, in addition to 1 / sqrt(H).
    """

    WEIGHT_USES: ClassVar[WeightUses] = {f"{name}.weight": MATRIX for name in ("wq", "wk", "wv", "wo")}

    def __init__(
        self, *, dim: int, n_heads: int, kv_heads: int, head_dim: int, qk_norm_eps: float | None = None,
        norm_all_heads: bool = False, bias: bool = False, output_bias: bool = False, sinks: bool = False,
        rotated_norm_eps: float | None = None, score_scale: float = 1.0, norm_class: type[RMSNorm] = RMSNorm,
    ):  # fmt: skip
        super().__init__()
        self.head_dim = head_dim
        self.head_rows: dict[str, int] = dict.fromkeys(("wq", "wk", "wv"), head_dim)
        """Rows of one head in each projection that computes heads."""
        self.wq = Linear(dim, n_heads * head_dim, bias=bias)
        self.wk = Linear(dim, kv_heads * head_dim, bias=bias)
        self.wv = Linear(dim, kv_heads * head_dim, bias=bias)
        self.wo = Linear(n_heads * head_dim, dim, bias=output_bias)

        def build_norm(heads: int) -> nn.Module | None:
            if qk_norm_eps is None:
                return None
            return (
                RMSNormOfHeads(heads * head_dim, eps=qk_norm_eps)
                if norm_all_heads
                else norm_class(head_dim, eps=qk_norm_eps)
            )

        self.q_norm = build_norm(n_heads)
        self.k_norm = build_norm(kv_heads)
        self.rotated_norm_eps = rotated_norm_eps
        self.score_scale = score_scale
        self.sinks = Sinks(n_heads) if sinks else None
        self.core = CoreAttention()

    def forward(self, x_BTD: Tensor, rope: Positions, mask: AttentionMask) -> Tensor:
        """Returns [B, T, D]."""
        return self.wo(self.heads(x_BTD, rope, mask))

    def heads(self, x_BTD: Tensor, rope: Positions, mask: AttentionMask) -> Tensor:
        """Returns the results of the heads [B, T, N H]; infers N, because tensor parallelism shards the projections."""
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTNH = self.q_norm(q_BTNH) if self.q_norm is not None else q_BTNH
        k_BTKH = self.k_norm(k_BTKH) if self.k_norm is not None else k_BTKH
        q_BTNH, k_BTKH = apply_positions(q_BTNH, k_BTKH, rope)
        if self.rotated_norm_eps is not None:
            q_BTNH, k_BTKH = (F.rms_norm(x, (self.head_dim,), eps=self.rotated_norm_eps) for x in (q_BTNH, k_BTKH))
        q_BTNH = q_BTNH * self.score_scale if self.score_scale != 1.0 else q_BTNH
        sinks_N = self.sinks() if self.sinks is not None else None
        return self.core(q_BTNH, k_BTKH, v_BTKH, mask, sinks_N).flatten(-2)
