"""OLMo hybrid and its size: gated delta nets, and in every fourth layer OLMo 2's block without positions.

Source: OLMo-core's recipe OLMo-hybrid; states that may change their sign, arXiv 2411.12537.
"""

from dataclasses import dataclass

from torch import nn

from torchtitan_clone.config.schema_training import Size
from torchtitan_clone.models.composed import AttentionOptions, DenseArgs, PostNormBlock, build, tensor_plan
from torchtitan_clone.models.decoder import Epsilon, Heads, Hidden, TransformerBlock, Vocabulary, Width
from torchtitan_clone.models.delta_net import GatedDeltaNet
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.hybrid import HybridArgs, initial_values
from torchtitan_clone.models.layer_kinds import LayerKind
from torchtitan_clone.models.plan import Styles, delta_net_styles
from torchtitan_clone.models.spec import ModelSpec

HEAD_NORM_EPS = 1e-5
"""Epsilon of the norms of heads of linear attention, whatever that of the other norms is."""


@dataclass(frozen=True, kw_only=True)
class OlmoHybridArgs(DividedHeads, HybridArgs, DenseArgs):
    """Arguments of OLMo hybrid."""

    dim: Width = 3840
    n_heads: Heads = 30
    hidden_dim: Hidden = 11008
    vocab_size: Vocabulary = 100352
    norm_eps: Epsilon = 1e-6
    max_seq_len: Size = 65536
    linear_key_heads: Heads = 30
    linear_value_heads: Heads = 30
    linear_key_dim: Width = 96
    linear_value_dim: Width = 192
    negative_eigenvalues: bool = True
    """Whether beta is from 0 to 2, instead of 1: a token may turn what a state holds of its key into the opposite."""

    def full_kind(self) -> LayerKind:
        return LayerKind(positions=None)

    def attention_options(self) -> AttentionOptions:
        return {"qk_norm_eps": self.norm_eps, "norm_all_heads": True}

    def build_attention(self, layer: int) -> nn.Module:
        if not self.is_linear(layer):
            return super().build_attention(layer)
        scale = 2.0 if self.negative_eigenvalues else 1.0
        return GatedDeltaNet(self.delta_sizes, dim=self.dim, norm_eps=HEAD_NORM_EPS, beta_scale=scale)

    def block_class(self, layer: int) -> type[TransformerBlock]:
        """Returns that with norms before linear attention, and after full attention."""
        return TransformerBlock if self.is_linear(layer) else PostNormBlock

    def styles(self) -> Styles:
        return super().styles() | delta_net_styles(self.linear_layers())


FLAVORS = {
    # The shipped tokenizer's vocabulary, and values of twice the size of keys; learns on two CPU cores.
    "debugmodel": OlmoHybridArgs(
        dim=256, n_layers=8, n_heads=4, hidden_dim=512, vocab_size=2048, max_seq_len=8192, linear_key_heads=4,
        linear_value_heads=4, linear_key_dim=48, linear_value_dim=96,
    ),
    "7B": OlmoHybridArgs(),
}  # fmt: skip

SPEC = ModelSpec(
    name="olmo_hybrid",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.olmo_hybrid.hf:HUB",
    initial_std=initial_values,
)
