"""Attention with a gate. Source: arXiv 2505.06708."""

from typing import ClassVar

from torch import Tensor

from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.rope import Positions
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.layers import Linear, ZeroCenteredRMSNorm
from torchtitan_clone.ops.weight_use import WeightUse, WeightUses


class GatedAttention(Attention):
    """Attention whose results are multiplied by sigmoid(wg x), with zero-centered norms of queries and keys."""

    WEIGHT_USES: ClassVar[WeightUses] = {**Attention.WEIGHT_USES, "wg.weight": WeightUse(saved=2.0)}

    def __init__(self, *, dim: int, n_heads: int, kv_heads: int, head_dim: int, norm_eps: float):
        super().__init__(
            dim=dim, n_heads=n_heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm_eps=norm_eps,
            norm_class=ZeroCenteredRMSNorm,
        )  # fmt: skip
        self.wg = Linear(dim, n_heads * head_dim, bias=False)
        self.head_rows["wg"] = head_dim

    def forward(self, x_BTD: Tensor, rope: Positions, mask: AttentionMask) -> Tensor:
        return self.wo(self.heads(x_BTD, rope, mask) * self.wg(x_BTD).sigmoid())
