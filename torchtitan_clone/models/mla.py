"""Multi-head latent attention: keys and values are computed from a small latent. Source: arXiv 2405.04434.

Legend: B batch, T tokens, t tokens of this rank in sequence parallelism, D model, L latent, N heads, H head dim,
C dimensions of a head without positions, R those with rotary positions, V dimensions of a value.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.models.attention import CoreAttention
from torchtitan_clone.models.rope import rotate
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.layers import Linear, RMSNorm
from torchtitan_clone.ops.weight_use import LATENT, MATRIX, WeightUses

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents in all published models, whatever that of the other norms is."""


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of latents and heads."""

    q_latent: int
    """0: queries are computed from the hidden states."""
    kv_latent: int
    nope: int
    """Dimensions of queries and keys without positions."""
    rope: int
    value: int

    @property
    def qk(self) -> int:
        """Dimensions of queries and keys."""
        return self.nope + self.rope


class TokenLinear(nn.Linear):
    """A projection that each tensor-parallel rank computes for its own tokens, with the complete weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local_with_partial_grad(self.weight))


class LatentAttention(nn.Module):
    """Attention with unequal sizes of keys and values, and a rotary key that all heads share.

    `score_scale` multiplies the scores, in addition to 1 / sqrt(C + R).
    """

    WEIGHT_USES: ClassVar[WeightUses] = {
        "wq_a.weight": LATENT, "wkv_a.weight": LATENT,
        **{f"{name}.weight": MATRIX for name in ("wq", "wq_b", "wkv_b", "wo")},
    }  # fmt: skip

    def __init__(self, sizes: LatentSizes, *, dim: int, n_heads: int, score_scale: float = 1.0):
        super().__init__()
        self.sizes = sizes
        self.score_scale = score_scale
        queries = n_heads * sizes.qk
        self.head_rows = {"wq_b" if sizes.q_latent else "wq": sizes.qk, "wkv_b": sizes.nope + sizes.value}
        """Rows of one head in each projection that computes heads."""
        if sizes.q_latent:
            self.wq_a = TokenLinear(dim, sizes.q_latent, bias=False)
            self.q_norm = RMSNorm(sizes.q_latent, eps=LATENT_NORM_EPS)
            self.wq_b = Linear(sizes.q_latent, queries, bias=False)
        else:
            self.wq = Linear(dim, queries, bias=False)
        self.wkv_a = TokenLinear(dim, sizes.kv_latent + sizes.rope, bias=False)
        self.kv_norm = RMSNorm(sizes.kv_latent, eps=LATENT_NORM_EPS)
        self.wkv_b = Linear(sizes.kv_latent, n_heads * (sizes.nope + sizes.value), bias=False)
        self.shared_key = nn.Identity()  # a module, so that tensor parallelism can gather the tokens of all ranks
        self.wo = Linear(n_heads * sizes.value, dim, bias=False)
        self.core = CoreAttention()

    def forward(self, x_BtD: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Returns [B, t, D]; infers the number of heads, because tensor parallelism shards the projections' outputs."""
        q_BTNH = self.queries(x_BtD, rope)
        return self.attend(q_BTNH, *self.latents(x_BtD, rope), mask)

    def queries(self, x_BtD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the queries of all heads [B, T, N, H], with positions."""
        sizes = self.sizes
        q_BTD = self.wq_b(self.q_norm(self.wq_a(x_BtD))) if sizes.q_latent else self.wq(x_BtD)
        q_BTNC, q_BTNR = q_BTD.unflatten(-1, (-1, sizes.qk)).split((sizes.nope, sizes.rope), dim=-1)
        q_BTNH = torch.cat((q_BTNC, rotate(q_BTNR, *rope)), dim=-1)
        return q_BTNH * self.score_scale if self.score_scale != 1.0 else q_BTNH

    def latents(self, x_BtD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the normalized latents [B, t, L], and the key that all heads share [B, T, 1, R]."""
        kv_BtL, key_BtR = self.wkv_a(x_BtD).split((self.sizes.kv_latent, self.sizes.rope), dim=-1)
        # Every rank has some of the heads: the gradient of their shared key is the sum over the ranks.
        return self.kv_norm(kv_BtL), rotate(local_with_partial_grad(self.shared_key(key_BtR))[:, :, None], *rope)

    def attend(self, q_BTNH: Tensor, latent_BtL: Tensor, key_BT1R: Tensor, mask: AttentionMask) -> Tensor:
        """Returns [B, t, D]: attention over the keys and values of these latents."""
        sizes = self.sizes
        kv_BTN = self.wkv_b(latent_BtL).unflatten(-1, (-1, sizes.nope + sizes.value))
        k_BTNC, v_BTNV = kv_BTN.split((sizes.nope, sizes.value), dim=-1)
        k_BTNH = torch.cat((k_BTNC, key_BT1R.expand(-1, -1, k_BTNC.shape[2], -1)), dim=-1)
        # The kernels need heads of one size; padding costs less than the kernels that do not.
        v_BTNH = F.pad(v_BTNV, (0, sizes.qk - sizes.value))
        out_BTNV = self.core(q_BTNH, k_BTNH, v_BTNH, mask)[..., : sizes.value]
        return self.wo(out_BTNV.flatten(-2))
