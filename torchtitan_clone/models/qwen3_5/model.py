"""Qwen3.5's arguments and blocks: gated delta nets, and attention with a gate in every fourth layer.

Qwen3-Next's are those with experts.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import nn

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import ComposedArgs, DenseArgs, ExpertsArgs
from torchtitan_clone.models.decoder import Epsilon, Heads, Hidden, Layers, RopeTheta, Vocabulary, Width
from torchtitan_clone.models.delta_net import GatedDeltaNet
from torchtitan_clone.models.gated_attention import GatedAttention
from torchtitan_clone.models.heads import PartlyRotary
from torchtitan_clone.models.hybrid import HybridArgs, initial_values
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.plan import Styles, delta_net_styles, gated_attention_styles, qk_norm_styles
from torchtitan_clone.models.spec import InitialValues
from torchtitan_clone.ops.layers import RMSNorm, ZeroCenteredRMSNorm


@dataclass(frozen=True, kw_only=True)
class GatedHybridArgs(PartlyRotary, HybridArgs, ComposedArgs):  # pyright: ignore[reportIncompatibleVariableOverride], a field
    """Arguments of a model with linear attention and attention with a gate."""

    n_kv_heads: Heads | None = 2
    head_dim: Width = 256  # pyright: ignore[reportIncompatibleMethodOverride], a field instead of a property
    vocab_size: Vocabulary = 248320
    norm_eps: Epsilon = 1e-6
    rope_theta: RopeTheta = 10000000.0
    max_seq_len: Size = 262144
    norm_class: ClassVar[type[RMSNorm]] = ZeroCenteredRMSNorm

    def build_attention(self, layer: int) -> nn.Module:
        if self.is_linear(layer):
            return GatedDeltaNet(self.delta_sizes, dim=self.dim, norm_eps=self.norm_eps)
        return GatedAttention(
            dim=self.dim, n_heads=self.n_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, norm_eps=self.norm_eps
        )

    def styles(self) -> Styles:
        linear = delta_net_styles(self.linear_layers())
        return super().styles() | qk_norm_styles() | gated_attention_styles() | linear


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Args(GatedHybridArgs, DenseArgs):  # pyright: ignore[reportIncompatibleVariableOverride], a field
    """Arguments of dense Qwen3.5."""

    dim: Width = 1024
    n_layers: Layers = 24
    n_heads: Heads = 8
    hidden_dim: Hidden = 3584


ROUTER = MoEArgs(shared_gate=True)


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoEArgs(GatedHybridArgs, ExpertsArgs):  # pyright: ignore[reportIncompatibleVariableOverride], a field
    """Arguments of Qwen3.5 and Qwen3-Next with experts, one of which every token passes, with a gate."""

    dim: Width = 2048
    n_layers: Layers = 40
    n_heads: Heads = 16
    linear_value_heads: Heads = 32
    moe: MoEArgs = field(
        default_factory=lambda: replace(ROUTER, num_experts=256, top_k=8, hidden_dim=512, num_shared_experts=1)
    )


def initial_values_of(args: GatedHybridArgs, name: str) -> InitialValues:
    """Returns the initial values of a parameter: of all norms but those of heads they are zero."""
    is_centered = "norm" in name and not name.endswith("attention.norm.weight")
    return 0.0 if is_centered else initial_values(args, name)
