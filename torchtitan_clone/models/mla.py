"""Multi-head latent attention: keys and values are computed from a small latent. Source: arXiv 2405.04434.

Legend: B batch, T tokens, t tokens of this rank in sequence parallelism, D model, L latent, N heads, H head dim,
C dimensions of a head without positions, R those with rotary positions, V dimensions of a value.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.models.attention import CoreAttention
from torchtitan_clone.models.composed import ComposedArgs
from torchtitan_clone.models.decoder import ModelArgs, Width
from torchtitan_clone.models.plan import Styles, latent_attention_styles, without_attention
from torchtitan_clone.models.rope import rotate, scale_queries
from torchtitan_clone.ops.attention import AttentionMask
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.layers import Linear, RMSNorm, TokenLinear
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


@dataclass(frozen=True, kw_only=True)
class LatentArgs(ModelArgs):
    """Arguments of a model with latent attention."""

    kv_lora_rank: Width = 512
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width = 128

    @property
    def head_dim(self) -> int:
        """Dimensions of a head with rotary positions."""
        return self.qk_rope_head_dim

    @property
    def attention_dim(self) -> float:
        return (self.latent_sizes.qk + self.v_head_dim) / 2

    @property
    def latent_sizes(self) -> LatentSizes:
        return LatentSizes(
            q_latent=0, kv_latent=self.kv_lora_rank, nope=self.qk_nope_head_dim, rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )  # fmt: skip

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.n_kv_heads not in (None, self.n_heads):
            errors.append(
                f"model.args.n_kv_heads = {self.n_kv_heads}: latent attention has as many as n_heads; unset it"
            )
        if self.v_head_dim > self.latent_sizes.qk:
            rule = f"must be at most qk_nope_head_dim + qk_rope_head_dim = {self.latent_sizes.qk}"
            errors.append(f"model.args.v_head_dim = {self.v_head_dim}: {rule}")
        return errors


@dataclass(frozen=True, kw_only=True)
class QueryLatentArgs(LatentArgs, ComposedArgs):
    """Arguments of a model whose queries have a latent too, and whose scores YaRN scales."""

    q_lora_rank: Annotated[int, Range(0, 2**24)] = 1536
    """Size of the latent of queries; 0: they are computed from the hidden states."""

    @property
    def latent_sizes(self) -> LatentSizes:
        return replace(super().latent_sizes, q_latent=self.q_lora_rank)

    @property
    def score_scale(self) -> float:
        """Returns the factor of the attention scores by which YaRN counters longer contexts."""
        scaling = self.rope_scaling
        return scaling.growth(scaling.mscale_all_dim) ** 2 if scaling and scaling.rope_type == "yarn" else 1.0

    def build_attention(self, layer: int) -> nn.Module:
        return LatentAttention(self.latent_sizes, dim=self.dim, n_heads=self.n_heads, score_scale=self.score_scale)

    def styles(self) -> Styles:
        latent = latent_attention_styles(has_query_latent=self.q_lora_rank > 0)
        return without_attention(super().styles()) | latent

    def violations(self) -> list[str]:
        errors = super().violations()
        if self.qk_rope_head_dim % 2:
            errors.append(f"model.args.qk_rope_head_dim = {self.qk_rope_head_dim} must be even, for rotary positions")
        if (scaling := self.rope_scaling) is not None and scaling.mscale_all_dim and not scaling.mscale:
            rule = "the format of the hub has it only with mscale; set both or none"
            errors.append(f"model.args.rope_scaling.mscale_all_dim = {scaling.mscale_all_dim}: {rule}")
        return errors


Rotation = tuple[Tensor, ...] | None
"""Cosines, sines, and where there is one the factor of queries; None: the key that heads share has no positions."""


def _rotated(x_BTNR: Tensor, rope: Rotation) -> Tensor:
    return x_BTNR if rope is None else rotate(x_BTNR, *rope[:2])


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

    def forward(self, x_BtD: Tensor, rope: Rotation, mask: AttentionMask) -> Tensor:
        """Returns [B, t, D]; infers the number of heads, because tensor parallelism shards the projections' outputs."""
        q_BTNH = self.queries(self.query_latent(x_BtD), rope)
        return self.attend(q_BTNH, *self.latents(x_BtD, rope), mask)

    def query_latent(self, x_BtD: Tensor) -> Tensor:
        """Returns what queries are computed from: their normalized latent, or without one the hidden states."""
        return self.q_norm(self.wq_a(x_BtD)) if self.sizes.q_latent else x_BtD

    def queries(self, x_BtL: Tensor, rope: Rotation) -> Tensor:
        """Returns the queries of all heads [B, T, N, H], with positions."""
        sizes = self.sizes
        q_BTD = self.wq_b(x_BtL) if sizes.q_latent else self.wq(x_BtL)
        q_BTNC, q_BTNR = q_BTD.unflatten(-1, (-1, sizes.qk)).split((sizes.nope, sizes.rope), dim=-1)
        q_BTNH = torch.cat((q_BTNC, _rotated(q_BTNR, rope)), dim=-1)
        q_BTNH = q_BTNH * self.score_scale if self.score_scale != 1.0 else q_BTNH
        return q_BTNH if rope is None else scale_queries(q_BTNH, *rope[2:])

    def latents(self, x_BtD: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Returns the normalized latents [B, t, L], and the key that all heads share [B, T, 1, R]."""
        kv_BtL, key_BtR = self.wkv_a(x_BtD).split((self.sizes.kv_latent, self.sizes.rope), dim=-1)
        # Every rank has some of the heads: the gradient of their shared key is the sum over the ranks.
        return self.kv_norm(kv_BtL), _rotated(local_with_partial_grad(self.shared_key(key_BtR))[:, :, None], rope)

    def attend(self, q_BTNH: Tensor, latent_BtL: Tensor, key_BT1R: Tensor, mask: AttentionMask) -> Tensor:
        """Returns [B, t, D]: attention over the keys and values of these latents."""
        k_BTNH, v_BTNV = self.keys_and_values(latent_BtL, key_BT1R)
        # The kernels need heads of one size; padding costs less than the kernels that do not.
        v_BTNH = F.pad(v_BTNV, (0, self.sizes.qk - self.sizes.value))
        out_BTNV = self.core(q_BTNH, k_BTNH, v_BTNH, mask)[..., : self.sizes.value]
        return self.wo(out_BTNV.flatten(-2))

    def keys_and_values(self, latent_BtL: Tensor, key_BT1R: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys [B, T, N, H] and values [B, T, N, V] of all heads."""
        sizes = self.sizes
        kv_BTN = self.wkv_b(latent_BtL).unflatten(-1, (-1, sizes.nope + sizes.value))
        k_BTNC, v_BTNV = kv_BTN.split((sizes.nope, sizes.value), dim=-1)
        return torch.cat((k_BTNC, key_BT1R.expand(-1, -1, k_BTNC.shape[2], -1)), dim=-1), v_BTNV
