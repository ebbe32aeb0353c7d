"""Llama 3's arguments and blocks. Source: arXiv 2407.21783."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torchtitan_clone.config.schema_training import Range
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import Decoder, Hidden, TransformerBlock, Width
from torchtitan_clone.models.heads import DividedHeads
from torchtitan_clone.ops.layers import SwiGLU


@dataclass(frozen=True, kw_only=True)
class Llama3Args(DividedHeads):
    """Arguments of Llama 3."""

    has_mup: ClassVar[bool] = True
    multiple_of: Width = 256
    ffn_dim_multiplier: Annotated[float, Range(0.0, 1000.0, above=True)] = 1.0
    hidden_dim: Hidden | None = None

    @property
    def ffn_hidden_dim(self) -> int:
        """Hidden size of the feed-forward: hidden_dim, or computed from the multipliers where that is unset."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        size = int(self.ffn_dim_multiplier * int(2 * 4 * self.dim / 3))  # 2/3 of 4 D, rounded up to a multiple
        return self.multiple_of * ((size + self.multiple_of - 1) // self.multiple_of)


def build(args: Llama3Args) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=build_block)


def build_block(args: Llama3Args, _layer: int) -> TransformerBlock:
    """Returns the block of a layer."""
    attention = Attention(dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim)
    feed_forward = SwiGLU(dim=args.dim, hidden_dim=args.ffn_hidden_dim)
    return TransformerBlock(args, attention=attention, feed_forward=feed_forward)
