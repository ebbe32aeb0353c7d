"""Kimi Linear's arguments and blocks: Kimi Delta Attention, and in every fourth layer attention without positions.

Legend: B batch, T tokens, D model. Source: arXiv 2510.26692.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import DenseThenExpertsArgs
from torchtitan_clone.models.decoder import Epsilon, Heads, Hidden, Layers, RopeTheta, Vocabulary, Width
from torchtitan_clone.models.delta_net import GATE, DeltaAttention, DeltaSizes, HeadDecay
from torchtitan_clone.models.hybrid import HybridArgs, LayerType, initial_values
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.mla import LatentArgs, LatentAttention
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.plan import Styles, kimi_delta_styles, latent_attention_styles, without_attention
from torchtitan_clone.models.spec import InitialValues
from torchtitan_clone.ops.layers import Linear, TokenLinear
from torchtitan_clone.ops.weight_use import REPLICATED, WeightUse, WeightUses

ROUTER = MoEArgs(score_func="sigmoid", expert_bias=True, num_shared_experts=1)


@dataclass(frozen=True, kw_only=True)
class KimiLinearArgs(HybridArgs, LatentArgs, DenseThenExpertsArgs):
    """Arguments of Kimi Linear; heads of linear attention have keys and values of one number and size."""

    dim: Width = 2304
    n_layers: Layers = 27
    n_heads: Heads = 32
    hidden_dim: Hidden = 9216
    vocab_size: Vocabulary = 163840
    norm_eps: Epsilon = 1e-5
    rope_theta: RopeTheta = 10000.0
    """Without effect: no layer has rotary positions."""
    max_seq_len: Size = 1048576
    layer_types: list[LayerType] = field(
        default_factory=lambda: ["full" if layer % 4 == 3 or layer == 26 else "linear" for layer in range(27)]
    )
    linear_key_heads: Heads = 32
    linear_value_heads: Heads = 32
    moe: MoEArgs = field(default_factory=lambda: ROUTER)

    def full_kind(self) -> LayerKind:
        return LayerKind(positions=None)

    def build_attention(self, layer: int) -> nn.Module:
        if self.is_linear(layer):
            return KimiDeltaAttention(self.delta_sizes, dim=self.dim, norm_eps=self.norm_eps)
        return LatentAttention(self.latent_sizes, dim=self.dim, n_heads=self.n_heads)

    def styles(self) -> Styles:
        linear = self.linear_layers()
        styles: Styles = without_attention(super().styles()) | kimi_delta_styles(linear)
        for layer in {*range(self.n_layers)} - {*linear}:
            styles |= latent_attention_styles(has_query_latent=False, layer=layer)
        return styles

    def violations(self) -> list[str]:
        errors = super().violations()
        for of in ("heads", "dim"):
            keys, values = (getattr(self, f"linear_{kind}_{of}") for kind in ("key", "value"))
            if keys != values:
                errors.append(f"model.args.linear_value_{of} = {values}: must be linear_key_{of} {keys} in kimi_linear")
        return errors


class LowRank(nn.Module):
    """A product of two matrices b a, with few features between them."""

    def __init__(self, dim: int, rank: int, features: int):
        super().__init__()
        self.a = TokenLinear(dim, rank, bias=False)
        self.b = Linear(rank, features, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.b(self.a(x_BTD))


class KimiDeltaAttention(DeltaAttention):
    """A decay for each dimension of keys, and a gate sigmoid(b a x)."""

    WEIGHT_USES: ClassVar[WeightUses] = {
        **DeltaAttention.WEIGHT_USES, "wa.a.weight": REPLICATED, "wg.a.weight": REPLICATED, "wg.b.weight": GATE,
        "wa.b.weight": WeightUse(saved=6.0),  # three tensors in fp32
    }  # fmt: skip

    def __init__(self, sizes: DeltaSizes, *, dim: int, norm_eps: float):
        super().__init__(sizes, dim=dim, norm_eps=norm_eps)
        features = sizes.key_heads * sizes.key
        self.wa = LowRank(dim, sizes.key, features)
        self.decay = HeadDecay(sizes.key_heads, channels=sizes.key)
        self.wg = LowRank(dim, sizes.key, features)
        self.head_rows |= {"wa.b": sizes.key, "wg.b": sizes.key}

    def forward(self, x_BTD: Tensor, _rope: object, starts_BT: Tensor | None) -> Tensor:
        """Returns [B, T, D]."""
        return self.wo(self.heads(x_BTD, self.decay(self.wa(x_BTD)), starts_BT) * self.wg(x_BTD).sigmoid())


def initial_values_of(args: KimiLinearArgs, name: str) -> InitialValues:
    """Returns the initial values of a parameter."""
    return initial_values(args, name, slowest=1.0)
