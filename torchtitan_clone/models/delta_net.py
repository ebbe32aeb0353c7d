"""Layers of linear attention by the gated delta rule, in place of attention.

Legend: B batch, T tokens, D model, H key heads, N heads, K and V dimensions of a key and of a value, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.ops.delta_rule import CHUNK, gated_delta_rule
from torchtitan_clone.ops.dtensor_shards import local_with_partial_grad
from torchtitan_clone.ops.layers import Linear, RMSNorm, gated_linear
from torchtitan_clone.ops.short_convolution import short_convolution
from torchtitan_clone.ops.weight_use import MATRIX, WeightUse, WeightUses


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of heads."""

    key_heads: int
    """Each serves `value_heads` / `key_heads` consecutive heads of values."""
    value_heads: int
    key: int
    value: int
    conv: int
    """Tokens that the convolutions see, each itself included."""

    @property
    def recurrent_flops(self) -> int:
        """FLOPs of a token's products with the states of all heads: with its key, its update and its query."""
        return 6 * self.value_heads * self.key * self.value

    @property
    def chunk_flops(self) -> int:
        """FLOPs of a token in chunks: with states, and with the tokens of its chunk."""
        return self.recurrent_flops + 4 * self.value_heads * CHUNK * (self.key + self.value)


class ShortConvolution(nn.Module):
    """The weights [C, W] of short_convolution(); a module, so that parallelism can shard or replace it."""

    WEIGHT_USES: ClassVar[WeightUses] = {"weight": WeightUse(is_matrix=False)}

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x_BTC: Tensor, starts_BT: Tensor | None) -> Tensor:
        return short_convolution(x_BTC, local_with_partial_grad(self.weight), starts_BT)


class HeadDecay(nn.Module):
    """Decays g = -exp(A_log) softplus(a + dt_bias) of heads, or of the `channels` dimensions of their keys, in fp32.

    Small errors of them add up over the tokens of a document.
    """

    KEEPS_DTYPE: ClassVar[bool] = True

    def __init__(self, heads: int, *, channels: int | None = None):
        super().__init__()
        self.channels = channels
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16.0).log_())
        self.dt_bias = nn.Parameter(torch.ones(heads * (channels or 1)))

    def forward(self, a_BTN: Tensor) -> Tensor:
        """Returns [B, T, N], or with channels [B, T, N, K] of [B, T, N K]."""
        A_log_N, dt_bias_N = (local_with_partial_grad(x).float() for x in (self.A_log, self.dt_bias))
        steps_BTN = F.softplus(a_BTN.float() + dt_bias_N)
        if self.channels is None:
            return -A_log_N.exp() * steps_BTN
        return -A_log_N.exp()[:, None] * steps_BTN.unflatten(-1, (-1, self.channels))


class DeltaRule(nn.Module):
    """What goes from token to token; a module, so that parallelism and generation can replace it."""

    def convolve(
        self, convolutions: Sequence[nn.Module], inputs: Sequence[Tensor], starts_BT: Tensor | None
    ) -> Sequence[Tensor]:
        """Returns a convolution of each input [B, T, C]."""
        return [convolution(x_BTC, starts_BT) for convolution, x_BTC in zip(convolutions, inputs, strict=True)]

    def forward(
        self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTNV: Tensor, decay_BTN: Tensor, beta_BTN: Tensor,
        starts_BT: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns [B, T, N, V] by the gated delta rule."""
        return gated_delta_rule(q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN, starts_BT)[0]


GATE = WeightUse(saved=4.0)
"""Of the matrix of a gate: besides its result, the heads before and after their norm, and the product are saved."""


class DeltaAttention(nn.Module):
    """Queries, keys and values through short convolutions, the gated delta rule, and a norm of each head.

    A subclass has decays, and a gate of the results. `beta_scale` multiplies sigmoid(wb x): with 2 a token may turn
    what the state holds of its key into the opposite.
    """

    WEIGHT_USES: ClassVar[WeightUses] = {
        **{f"{name}.weight": WeightUse(saved=2.0) for name in ("wq", "wk", "wv")},
        "wb.weight": MATRIX,
        "wo.weight": MATRIX,
    }

    def __init__(self, sizes: DeltaSizes, *, dim: int, norm_eps: float, beta_scale: float = 1.0):
        super().__init__()
        self.beta_scale = beta_scale
        keys, values = sizes.key_heads * sizes.key, sizes.value_heads * sizes.value
        self.head_rows = {"wq": sizes.key, "wk": sizes.key, "wv": sizes.value}
        """Rows of one head in each projection that computes heads."""
        self.wq = Linear(dim, keys, bias=False)
        self.wk = Linear(dim, keys, bias=False)
        self.wv = Linear(dim, values, bias=False)
        self.wb = Linear(dim, sizes.value_heads, bias=False)
        self.q_conv = ShortConvolution(keys, sizes.conv)
        self.k_conv = ShortConvolution(keys, sizes.conv)
        self.v_conv = ShortConvolution(values, sizes.conv)
        self.core = DeltaRule()
        self.norm = RMSNorm(sizes.value, eps=norm_eps)
        self.wo = Linear(values, dim, bias=False)

    def heads(self, x_BTD: Tensor, decay_BTN: Tensor, starts_BT: Tensor | None) -> Tensor:
        """Returns the results of the heads [B, T, N V]; infers N, because tensor parallelism shards the projections."""
        convolutions = self.q_conv, self.k_conv, self.v_conv
        q, k, v = self.core.convolve(convolutions, (self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)), starts_BT)
        q_BTHK = q.unflatten(-1, (-1, self.head_rows["wq"]))
        k_BTHK = k.unflatten(-1, (-1, self.head_rows["wk"]))
        v_BTNV = v.unflatten(-1, (-1, self.head_rows["wv"]))
        beta_BTN = self.wb(x_BTD).sigmoid()
        beta_BTN = beta_BTN * self.beta_scale if self.beta_scale != 1.0 else beta_BTN
        return self.norm(self.core(q_BTHK, k_BTHK, v_BTNV, decay_BTN, beta_BTN, starts_BT)).flatten(-2)


class GatedDeltaNet(DeltaAttention):
    """One decay for each head, and a gate of SiLU. Source: arXiv 2412.06464."""

    WEIGHT_USES: ClassVar[WeightUses] = {
        **DeltaAttention.WEIGHT_USES, "wa.weight": MATRIX, "wg.weight": GATE,
    }  # fmt: skip

    def __init__(self, sizes: DeltaSizes, *, dim: int, norm_eps: float, beta_scale: float = 1.0):
        super().__init__(sizes, dim=dim, norm_eps=norm_eps, beta_scale=beta_scale)
        self.wa = Linear(dim, sizes.value_heads, bias=False)
        self.decay = HeadDecay(sizes.value_heads)
        self.wg = Linear(dim, sizes.value_heads * sizes.value, bias=False)
        self.head_rows["wg"] = sizes.value

    def forward(self, x_BTD: Tensor, _rope: object, starts_BT: Tensor | None) -> Tensor:
        """Returns [B, T, D]."""
        return gated_linear(self.wo, self.wg(x_BTD), self.heads(x_BTD, self.decay(self.wa(x_BTD)), starts_BT))
