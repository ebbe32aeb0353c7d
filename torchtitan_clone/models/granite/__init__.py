"""Granite 3's dense models and their sizes: Llama with four factors. Source: arXiv 2408.13359."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.models.composed import AttentionOptions, DenseArgs, build, tensor_plan
from torchtitan_clone.models.decoder import Heads, Layers, RopeTheta, TransformerBlock, Vocabulary
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.models.rope import Positions
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.attention import AttentionMask

Multiplier = Annotated[float, Range(0.0, 1e6, above=True)]


@dataclass(frozen=True, kw_only=True)
class GraniteArgs(DividedHeads, DenseArgs):
    """Arguments of Granite 3."""

    n_layers: Layers = 40
    n_kv_heads: Heads | None = 8
    hidden_dim: int = 12800
    vocab_size: Vocabulary = 49155
    rope_theta: RopeTheta = 10000000.0
    tied_embeddings: bool = True
    embedding_multiplier: Multiplier = 12.0
    attention_multiplier: Multiplier = 0.0078125
    """Factor of the attention scores, instead of 1 / sqrt(H)."""
    residual_multiplier: Multiplier = 0.22
    """Factor of what attention and feed-forward add to the hidden states."""
    logits_scaling: Multiplier = 16.0
    """What the logits are divided by."""

    def scales(self) -> tuple[float, float]:
        return self.embedding_multiplier, 1.0 / self.logits_scaling

    def attention_options(self) -> AttentionOptions:
        return {"score_scale": self.attention_multiplier * self.head_dim**0.5}

    def block_class(self, layer: int) -> type[TransformerBlock]:
        return ScaledBlock


class ScaledBlock(TransformerBlock):
    """A block that adds results times a factor to the hidden states."""

    def __init__(self, args: GraniteArgs, *, attention: nn.Module, feed_forward: nn.Module):
        super().__init__(args, attention=attention, feed_forward=feed_forward)
        self.scale = args.residual_multiplier

    def forward(
        self, x_BTD: Tensor, rope: Positions, mask: AttentionMask, is_context_BT: Tensor | None = None
    ) -> Tensor:
        """Returns [B, T, D]; there is no router that would ask for context."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask) * self.scale
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD)) * self.scale


FLAVORS = {
    # The shipped tokenizer's vocabulary; learns on two CPU cores.
    "debugmodel": GraniteArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048, max_seq_len=8192,
        attention_multiplier=0.03125, logits_scaling=4.0,
    ),
    "2B": GraniteArgs(
        dim=2048, hidden_dim=8192, rope_theta=5000000.0, attention_multiplier=0.015625, logits_scaling=8.0
    ),
    "8B": GraniteArgs(),
}  # fmt: skip

SPEC = ModelSpec(
    name="granite",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.granite.hf:HUB",
)
